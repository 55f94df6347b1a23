"""Are all gradients finite? Agreed on all ranks before any of them updates a weight.

A NaN of one rank is on all ranks once gradients are summed, so the question costs one maximum over what a rank holds
and one small all-reduce. Where it came from is told by each rank's own gradients before the sum; their maxima are
taken as buckets are launched, and are looked at only when something is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import world_maximum
from lightning_megatron.mesh.watch.failure import AgreedFailure


class NonFiniteError(AgreedFailure):
    """A loss or a gradient is NaN or infinite."""


@dataclass(frozen=True)
class Finding:
    """What one rank found in a step.

    Attributes:
        rank: global rank.
        place: its coordinates, in words.
        micro_batch: first micro-batch whose loss is not finite.
        parameter: first parameter, in registration order, whose gradient is not finite on this rank, before the sum.
    """

    rank: int
    place: str
    micro_batch: int | None
    parameter: str | None

    def describe(self, step: int) -> str:
        """A sentence."""
        loss = f"the loss of micro-batch {self.micro_batch} is not finite" if self.micro_batch is not None else ""
        grad = f"`{self.parameter}` is the first parameter with a gradient that is not" if self.parameter else ""
        both = "; ".join(part for part in (loss, grad + (" finite" if grad and not loss else "")) if part)
        return f"{self.place}, step {step}: {both or 'the sum of gradients is not finite, those of each rank are'}."


def largest(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The largest absolute value, a float32 scalar; infinite or NaN if one of the gradients is."""
    norms = [torch.linalg.vector_norm(gradient, float("inf")) for gradient in gradients if gradient.numel()]
    if not norms:
        return torch.zeros((), device=device)
    return torch.stack([norm.to(device, torch.float32) for norm in norms]).max()


def agree_on_overflow(value: Tensor) -> bool:
    """Whether ``value`` is infinite or NaN on any rank of the world."""
    bad = torch.isfinite(value).logical_not().to(torch.float32)
    return bool(world_maximum(bad).item())


def worst(finding: Finding) -> Finding:
    """The finding to report, equal on every rank: the first rank with a bad loss, else with a bad gradient."""
    return min(objects.gather(finding), key=lambda each: (each.micro_batch is None, each.parameter is None, each.rank))
