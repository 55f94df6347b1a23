"""What autograd is doing on this thread: layers and random streams behave differently while a backward runs."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread, so that a module called now is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)
