"""Plans where the weights and state of each bucket of this rank are stored, and where its optimizers step on them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from lightning_megatron.data_parallel.buckets.host_memory import HostMemory
from lightning_megatron.data_parallel.update.hosted_steps import HostedSteps
from lightning_megatron.data_parallel.update.sent_gradients import SentGradients
from lightning_megatron.data_parallel.update.trial import seconds_of
from lightning_megatron.mesh.messages.host_link import HostLink

_ELEMENTS = 1 << 20
_ROUNDS = 3


@dataclass
class HostPlan:
    """The part of this rank's share that is stored in host memory.

    Attributes:
        memory: of this host.
        link: between it and the device.
        keeps: elements that may yet stay on the device.
        apart: whether optimizers may step bucket by bucket.
        stride: every how manieth bucket steps on the device; ``None`` for none.
        sent: gradients that are copied there, or were.
    """

    memory: HostMemory
    link: HostLink
    keeps: float = 0.0
    apart: bool = True
    stride: int | None = None
    sent: SentGradients = field(init=False)

    def __post_init__(self) -> None:
        self.sent = SentGradients(self.memory, self.link)

    def memory_for(self, elements: int) -> HostMemory | None:
        """Memory for the master weights of one more bucket; ``None`` if they stay on the device."""
        if 0 < elements <= self.keeps:
            self.keeps -= elements
            return None
        return self.memory

    def steps(self, optimizer: Optimizer) -> HostedSteps:
        """The object that takes the steps of an optimizer."""
        return HostedSteps(optimizer, self.memory, self.link, self.sent, apart=self.apart, stride=self.stride)


@dataclass(frozen=True)
class Speeds:
    """Measured here.

    Attributes:
        steps: parameters that the processor steps on per second.
        bytes_per_s: from host memory to the device.
    """

    steps: float
    bytes_per_s: float


def measure(optimizer: Optimizer, memory: HostMemory, link: HostLink, device: torch.device) -> Speeds:
    """Time a copy of ``optimizer`` on a million parameters, and a copy of as many numbers to ``device``."""
    source, target = memory.empty(_ELEMENTS, torch.float32), torch.empty(_ELEMENTS, device=device)
    best = float("inf")
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        link.start(target, source).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return Speeds(_ELEMENTS / seconds_of(optimizer, _ELEMENTS), 4 * _ELEMENTS / best)
