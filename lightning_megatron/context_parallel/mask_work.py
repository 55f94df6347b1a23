"""Deals tokens out by what a mask leaves of their work.

With documents packed into a sequence, or a window, the work of a token is not its place in the sequence, and pieces
dealt out in zigzag order are uneven: 32,768 tokens of documents of 2,048 on average gave one of 4 ranks up to twice the
mean. Where the layers are given a mask, each rank gets the same number of pieces, those with the most work first,
each to the rank that has the least so far::

    keys that a token sees      1 2 3 4 5 6   1 2   1 2 3 4      documents of 6, 2 and 4 tokens
    work of pieces of two        3   7   11    3     3   7
    rank 0                       #       ##                      14, and one piece more:  17
    rank 1                           #               #   #       17

The mask is the same on all context ranks, as their batches are. They take the first one's numbers all the same: ranks
whose batches differ are to end with the comparison of batches and losses, not with messages of other sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_megatron.context_parallel import rule_masks
from lightning_megatron.context_parallel.rule_masks import RuleMask
from lightning_megatron.context_parallel.token_split import Run, joined
from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.messages.collectives import raw_broadcast

PIECES = 16
"""Of a rank: as many, of documents of any length, leave at most a twentieth more than the mean on one."""
_HIDDEN = -1e4
"""What is added to the scores of keys that are not seen is lower."""


def mask_among(values: Iterable[object], length: int, besides: Tensor) -> Tensor | None:
    """A mask [.., tokens, tokens] among what a layer is given, without a gradient."""
    for value in tree_leaves(list(values)):
        if not isinstance(value, Tensor) or isinstance(value, WholeTensor) or value is besides or value.requires_grad:
            continue
        if value.shape[-2:] == (length, length) and (value.dtype == torch.bool or value.is_floating_point()):
            return value
    return None


def pieces_of(length: int, ranks: int) -> list[Run]:
    """Pieces of nearly equal size, as many for each rank."""
    count = ranks * min(PIECES, length // ranks)
    return list(itertools.pairwise(length * index // count for index in range(count + 1)))


def work_of(mask: Tensor, ranks: int, *, true_hides: bool) -> list[int] | None:
    """How many keys the tokens of each piece see, over all samples and heads; ``None`` if no key is hidden.

    Args:
        mask: [.., tokens, tokens], booleans or what is added to scores.
        ranks: to which pieces are dealt.
        true_hides: whether ``True`` hides a key, as in ``nn.MultiheadAttention``.
    """
    step = max(1, rule_masks.AT_A_TIME // mask.shape[-1])
    parts = []
    for start in range(0, mask.shape[-2], step):
        stop = min(start + step, mask.shape[-2])
        rows = mask.part(start, stop, 0, mask.shape[-1]) if isinstance(mask, RuleMask) else mask[..., start:stop, :]
        seen = rows > _HIDDEN if rows.is_floating_point() else ~rows if true_hides else rows
        parts.append(seen.sum(-1).reshape(-1, stop - start).sum(0))
    tokens = torch.cat(parts).tolist()
    if sum(tokens) == mask.numel():
        return None
    return [sum(tokens[start:stop]) for start, stop in pieces_of(len(tokens), ranks)]


def runs_by_work(work: Sequence[int], length: int, ranks: int) -> tuple[tuple[Run, ...], ...]:
    """Runs of each rank: as many pieces for each, and about the same work.

    Args:
        work: of each piece.
        length: tokens; no fewer than ranks.
        ranks: to which they are dealt.
    """
    pieces = sorted(zip(work, pieces_of(length, ranks), strict=True), key=lambda each: (-each[0], each[1]))
    dealt, loads = [list[Run]() for _ in range(ranks)], [0] * ranks
    for first in range(0, len(pieces), ranks):
        least = sorted(range(ranks), key=loads.__getitem__)
        for (amount, piece), rank in zip(pieces[first : first + ranks], least, strict=True):
            dealt[rank].append(piece)
            loads[rank] += amount
    return tuple(joined(sorted(runs)) for runs in dealt)


def balance_of(work: Sequence[int], length: int, runs: Sequence[Sequence[Run]]) -> float:
    """The most work of a rank, divided by the mean."""
    pieces = list(zip(work, pieces_of(length, len(runs)), strict=True))
    loads = [sum(amount for amount, (a, b) in pieces if any(s <= a and b <= e for s, e in own)) for own in runs]
    return max(loads) * len(loads) / max(1, sum(loads))


def agreed(work: list[int] | None, length: int, group: dist.ProcessGroup, device: torch.device) -> list[int] | None:
    """The first context rank's numbers, or ``None`` if it has none; a collective over ``group``."""
    numbers = work or [-1] * len(pieces_of(length, group.size()))
    told = torch.tensor(numbers, dtype=torch.long, device=device)
    raw_broadcast(told, dist.get_global_rank(group, 0), group)
    found: list[int] = told.tolist()
    return None if found[0] < 0 else found
