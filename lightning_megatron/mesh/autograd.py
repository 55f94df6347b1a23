"""Tells whether autograd runs a backward: layers and random streams behave differently inside of one."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread, so that a module called now is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)
