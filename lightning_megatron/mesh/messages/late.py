"""An answer that an accelerator finds out, read on the host in a later step, when it has long been known."""

from __future__ import annotations

import torch
from torch import Tensor


class LateAnswer:
    """One answer, on its way to the host; reading it waits for what was asked for before it, and for nothing after.

    Args:
        answer: one element, on an accelerator or the CPU.
    """

    def __init__(self, answer: Tensor) -> None:
        pinned = answer.device.type != "cpu"
        self._host = torch.empty(answer.shape, dtype=answer.dtype, pin_memory=pinned)
        self._host.copy_(answer, non_blocking=pinned)
        self._there = torch.Event(answer.device) if pinned else None
        if self._there is not None:
            self._there.record()

    def __bool__(self) -> bool:
        if self._there is not None:
            self._there.synchronize()
        return bool(self._host)
