"""Gives this package's own mixtures the statistics of the whole batch, that of all replicas.

A balancing loss ``E · Σ_i f_i P_i`` is linear in P once f is known, so the replicas add up how often each expert was
chosen, and their means of P stay where they are::

    replica 0   f⁰ P⁰  ┐  f = f⁰ + f¹   ┌  E · Σ f_i P⁰_i  ┐  the mean over replicas is the loss of one process,
    replica 1   f¹ P¹  ┘                └  E · Σ f_i P¹_i  ┘  and so are its gradients

In micro-batches, a pass of counts finds f before; see :mod:`of_parts`.

Where experts have a capacity, the replicas tell each other their choices, and each counts its own tokens' places in the
queues of one process, whose order is that of its batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.experts.balance.of_parts import PartsOfBatch, left_aside
from lightning_megatron.experts.exchange.gathering import gathered_rows
from lightning_megatron.layers import MoE
from lightning_megatron.layers.mixture import moe
from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.messages.collectives import raw_all_gather, raw_all_reduce
from lightning_megatron.mesh.replaced import Replacements


def drops_tokens(module: nn.Module) -> bool:
    """Whether experts have a capacity for all tokens of a batch."""
    return any(isinstance(child, MoE) and child.capacity_factor is not None for child in module.modules())


class WholeBatchMixtures:
    """Gives :class:`~lightning_megatron.layers.MoE` the statistics of all replicas, during one run.

    Args:
        module: the user's.
        group: the replicas; ``None`` for one, or if each replica's own is meant.
        in_step: whether a step is running, in which all replicas take part.
        in_turns: whether sample i of a batch is on replica i % d; otherwise each replica has neighbouring samples.

    Attributes:
        called: whether a balancing loss of the whole batch has been made in a step.
        parts: what losses were given in micro-batches, or how they are left out in trials.
        here: whether the module has such mixtures.
        samples: how many this replica's batch has; ``None`` where that is not known.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        in_step: Callable[[], bool],
        in_turns: Callable[[], bool],
    ) -> None:
        self._group, self._in_step, self._in_turns = group, in_step, in_turns
        self._replaced, self.called, self.parts = Replacements(), False, PartsOfBatch()
        self.samples: int | None = None
        self.here = any(isinstance(child, MoE) for child in module.modules())
        if self.here:
            for name, mine in (("balancing_loss", self._loss), ("places_in_queues", self._places)):
                own = getattr(moe, name)
                self._replaced.put(moe, name, functools.wraps(own)(functools.partial(mine, own)))

    def close(self) -> None:
        """Put the replaced functions back."""
        self._replaced.take_back()

    @torch.compiler.disable
    def _loss(self, own: Callable[..., Tensor], mean_scores: Tensor, choices: Tensor, tokens: Tensor) -> Tensor:
        if not self._in_step():
            return own(mean_scores, choices, tokens)
        self.called = True
        if self.parts.running:
            return self._of_part(own, mean_scores, choices, tokens)
        if self._group is not None:
            told = raw_all_reduce(torch.cat((choices.detach(), tokens.detach().view(1).to(choices))), self._group)
            mean_scores = mean_scores * (tokens * self._group.size() / told[-1])  # of replicas with unlike batches
            choices, tokens = told[:-1], told[-1]
        return own(mean_scores, choices, tokens)

    def _of_part(self, own: Callable[..., Tensor], mean_scores: Tensor, choices: Tensor, tokens: Tensor) -> Tensor:
        """The loss in a micro-batch, or in a trial."""
        if self.parts.aside:
            return left_aside(mean_scores)
        if self.parts.alone:
            return own(mean_scores, choices, tokens)
        if self.parts.notes:
            self.parts.note((mean_scores.detach(), choices.detach(), tokens.detach()))
            return own(mean_scores.detach(), choices, tokens)
        (means, chosen, total), _, factor = self.parts.taken()
        share = factor * tokens.detach() / total
        return own(means + share * (mean_scores - mean_scores.detach()), chosen, total)

    def join(self, factors: list[float], group: dist.ProcessGroup | None) -> None:
        """Add up what was noted; see :meth:`~.of_parts.PartsOfBatch.join`.

        Args:
            factors: of gradients, of each micro-batch.
            group: the replicas that have parts of the batch, all of which do this now; ``None`` for one.
        """
        self.parts.join(factors, functools.partial(_joined, group))

    @torch.compiler.disable
    def _places(self, own: Callable[..., Any], index: Tensor, experts: int, lead: torch.Size) -> tuple[Tensor, int]:
        if self._group is None or not (self._in_step() or in_backward()):
            return own(index, experts, lead)  # type: ignore[no-any-return]
        in_turns, index = self._in_turns(), index.full() if isinstance(index, WholeTensor) else index
        if (len(lead) < 2 and in_turns) or (len(lead) > 1 and self.samples not in (None, lead[0])):
            raise ValueError(
                f"`MoE(capacity_factor=...)` was called with `x: {[*lead, '...']}` for {self.samples} samples on this "
                "replica: over replicas tokens are dropped by their place in the batch of all, so the first dim of `x` "
                "must be that of the samples. Call it with `[batch, sequence, hidden]`."
            )
        told = torch.tensor([[len(index), lead[0]]], device=index.device)
        sizes, samples = zip(*raw_all_gather(told, 0, self._group).tolist(), strict=True)
        order = _order(sizes, samples, index.device) if in_turns else torch.arange(sum(sizes), device=index.device)
        place, tokens = own(gathered_rows(index, sizes, self._group)[order], experts, lead)
        back = torch.empty_like(place)
        back[order] = place
        start = sum(sizes[: self._group.rank()])
        return back[start : start + len(index)], tokens


def _joined(group: dist.ProcessGroup | None, noted: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """Mean scores, choices and tokens of all micro-batches."""
    scores = sum(means * tokens for means, _, tokens in noted)
    choices, tokens = (sum(each[at] for each in noted) for at in (1, 2))
    told = torch.cat((cast(Tensor, scores), cast(Tensor, choices), cast(Tensor, tokens).view(1).to(scores)))
    told = told if group is None else raw_all_reduce(told, group)
    scores, choices = told[:-1].chunk(2)
    return scores / told[-1], choices, told[-1]


def _order(sizes: tuple[int, ...], samples: tuple[int, ...], device: torch.device) -> Tensor:
    """The tokens of all replicas, listed one replica after another, in the order of the one batch dealt out in turns.

    Example:
        Replicas with samples (0, 2) and (1, 3) of one token each: 0, 2, 1, 3 is brought into order by 0, 2, 1, 3.
    """
    numbers = [
        torch.arange(tokens, device=device) // (tokens // count) * len(sizes) + replica
        for replica, (tokens, count) in enumerate(zip(sizes, samples, strict=True))
        if tokens
    ]
    return torch.cat(numbers).argsort(stable=True)
