"""Seconds that a device computes, without what is done in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Context that is timed.

    Args:
        device: that computes; waited for at both ends, where it is no processor.

    Attributes:
        seconds: between its ends, without what was `stopped`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds, self._begun = device, 0.0, 0.0

    def __enter__(self) -> None:
        self._begun = self._now()

    def __exit__(self, *_: Any) -> None:
        self.seconds += self._now() - self._begun

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock: time in this context is not counted."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds -= time.perf_counter() - begun

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
