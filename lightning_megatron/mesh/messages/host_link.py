"""Copies between the device and host memory, which go on while the processor steps.

::

    room(source)            memory of the host for a copy of ``source``
    start(target, source)   the copy begins; neither is touched until it is waited for
    Copy.wait()             the processor, or for a target on the device the device, goes on after it
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import Tensor

_PROBE = 1 << 26
"""Bytes of a copy that is timed."""


class Copy:
    """A copy under way; this one is through already."""

    def wait(self) -> None:
        """Let whoever reads the target go on only after the copy."""


class HostLink:
    """Copies of a device that shares its memory with the processor: through as soon as they are started."""

    @property
    def bytes_per_second(self) -> float:
        """How fast it copies while the device computes; infinite where nobody waits for copies."""
        return float("inf")

    def room(self, source: Tensor) -> Tensor:
        """Uninitialized memory of the host for ``source``, without gaps; pinned for a device with memory of its own."""
        form = torch.contiguous_format
        return torch.empty_like(source, device="cpu", memory_format=form, pin_memory=source.is_cuda)

    def start(self, target: Tensor, source: Tensor) -> Copy:
        """Begin to copy ``source`` into ``target``, of the same number of elements."""
        target.copy_(source)
        return Copy()


class _CudaCopy(Copy):
    def __init__(self, event: Any, target: Tensor) -> None:
        self._event, self._on_device = event, target.is_cuda

    def wait(self) -> None:
        if self._on_device:
            torch.cuda.current_stream().wait_event(self._event)
        else:
            self._event.synchronize()


class CudaLink(HostLink):
    """Copies on a stream of their own in either direction, after what the device was told before.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = {on_device: torch.cuda.Stream(device) for on_device in (True, False)}
        self._device = device

    @functools.cached_property
    def bytes_per_second(self) -> float:
        """Measured, to the host."""
        source = torch.empty(_PROBE, dtype=torch.uint8, device=self._device)
        target, best = torch.empty(_PROBE, dtype=torch.uint8, pin_memory=True), float("inf")
        for _ in range(3):
            torch.cuda.synchronize(self._device)
            begun = time.perf_counter()
            self.start(target, source).wait()
            best = min(best, time.perf_counter() - begun)
        return _PROBE / best

    def start(self, target: Tensor, source: Tensor) -> Copy:
        """Start copying on the stream of that direction, after what the current stream has been given so far."""
        stream = self._streams[target.is_cuda]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        return _CudaCopy(event, target)


def link_for(device: torch.device) -> HostLink:
    """The link that copies between ``device`` and host memory."""
    return CudaLink(device) if device.type == "cuda" else HostLink()
