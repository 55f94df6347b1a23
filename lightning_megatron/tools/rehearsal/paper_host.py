"""Host memory of a rehearsed rank: as large as it is said to be, and apart from the device's, which a meter counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_megatron.data_parallel.buckets.host_memory import GIB
from lightning_megatron.mesh.messages.host_link import Copy, HostLink
from lightning_megatron.strategy.activations.host_budget import Host


class _UnseenLink(HostLink):
    """Copies of which no meter sees the host's side."""

    def room(self, source: Tensor) -> Tensor:
        """As that of a launch."""
        with _disable_current_modes():
            return super().room(source)

    def start(self, target: Tensor, source: Tensor) -> Copy:
        """As that of a launch."""
        with _disable_current_modes():
            return super().start(target, source)


class PaperHost(Host):
    """A host that has so much memory for activations.

    Args:
        gib: of memory; ``None``: as much as is asked for.
        stages: gives those of the ranks on it; by default this one's alone.
    """

    name = "the host"

    def __init__(self, gib: float | None, stages: Callable[[], Sequence[int]] | None = None) -> None:
        self._size, self._stages = math.inf if gib is None else gib * GIB, stages

    def link(self, device: torch.device) -> HostLink:
        """One that nobody waits for."""
        return _UnseenLink()

    def free(self, held: int) -> float:
        """All of it, before the step."""
        return self._size

    def stages(self, mine: int) -> Sequence[int]:
        """Those it was told."""
        return [mine] if self._stages is None else self._stages()
