"""Checks that all gradients are finite; all ranks agree before any of them updates a weight.

A NaN on one rank reaches the other replicas when gradients are summed. The check therefore costs one maximum over the
gradients that a rank holds, and one small all-reduce. To name the origin, the maximum of each of the rank's own
gradients is taken before its bucket is reduced; these maxima are read only if the check fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import world_maximum
from lightning_megatron.mesh.watch.board import AgreedFailure


class NonFiniteError(AgreedFailure):
    """A loss or a gradient is NaN or infinite."""


@dataclass(frozen=True)
class RankFinding:
    """Findings of one rank in a step.

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
        """The finding as a sentence for the user."""
        loss = f"the loss of micro-batch {self.micro_batch} is not finite" if self.micro_batch is not None else ""
        grad = f"`{self.parameter}` is the first parameter with a gradient that is not" if self.parameter else ""
        both = "; ".join(part for part in (loss, grad + (" finite" if grad and not loss else "")) if part)
        return f"{self.place}, step {step}: {both or 'the sum of gradients is not finite, those of each rank are'}."


def largest(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The largest absolute value: a float32 scalar on ``device``, infinite or NaN if an element is."""
    norms = [torch.linalg.vector_norm(gradient, float("inf")) for gradient in gradients if gradient.numel()]
    if not norms:
        return torch.zeros((), device=device)
    return torch.stack([norm.to(device, torch.float32) for norm in norms]).max()


def agree_on_overflow(value: Tensor) -> bool:
    """Whether ``value``, a scalar, is infinite or NaN on any rank; collective over the world."""
    bad = torch.isfinite(value).logical_not().to(torch.float32)
    return bool(world_maximum(bad).item())


def worst(finding: RankFinding) -> RankFinding:
    """The finding to report: of the first rank with a bad loss, else with a bad gradient; collective over the world."""
    return min(objects.gather(finding), key=lambda each: (each.micro_batch is None, each.parameter is None, each.rank))
