"""Tokens of all ranks on each of them, and what each of them makes of them summed where they came from.

Where a token goes to more experts than there are ranks, sending each rank all tokens once takes fewer messages than
sending each token to all of its experts (``expert_dispatch="all_gather"``). Two ranks, three tokens and two::

    rank 0   a b c   ┐                 ┌  experts 0 1 of  a b c d e  ┐                  ┌  a b c
                     ├─▶  a b c d e  ─▶┤                             ├─▶  sum over both ┤
    rank 1   d e     ┘                 └  experts 2 3 of  a b c d e  ┘                  └  d e

================  ===================  ===================
function          forward              backward
================  ===================  ===================
``gather_rows``   all-gather           sum, own rows
``scatter_rows``  sum, own rows        all-gather
================  ===================  ===================

Ranks may have different numbers of rows, and none. Sums are in 32 bits or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.experts.exchange.anchors import anchor_for, gradient_of, leave
from lightning_megatron.experts.exchange.taking_part import Calls
from lightning_megatron.mesh.messages.collectives import raw_all_gather, raw_reduce_scatter

Of = tuple[Calls, int]
"""The calls of all mixtures, and the number of the one whose tokens are gathered."""


def gather_rows(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup, of: Of | None = None) -> Tensor:
    """Rows of all ranks, in the order of the ranks; collective over the group, in the backward too.

    Args:
        rows: this rank's, [n, ...].
        sizes: n of each rank.
        group: the ranks.
        of: the mixture; makes the message part of the graph whether ``rows`` have gradients or not.

    Example:
        2 ranks with [3, h] and [2, h]: [5, h] on both.
    """
    return _noted(_Gathered.apply(rows, anchor_for(rows, wanted=of is not None), tuple(sizes), group, of), of)


def scatter_rows(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup, of: Of | None = None) -> Tensor:
    """The sum over the ranks of what they have for each row, of which each gets its own; arguments as above.

    Example:
        2 ranks with [5, h] each, sizes 3 and 2: [3, h] and [2, h].
    """
    return _noted(_Scattered.apply(rows, anchor_for(rows, wanted=of is not None), tuple(sizes), group, of), of)


def _noted(found: tuple[Tensor, Tensor], of: Of | None) -> Tensor:
    rows, root = found
    if of is not None:
        of[0].joint.note(root)
    return rows


def gathered_rows(rows: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks, whose numbers are ``sizes``, outside autograd; collective over the group."""
    most = max(sizes)
    padded = torch.cat((rows, rows.new_zeros(most - len(rows), *rows.shape[1:])))
    blocks = raw_all_gather(padded, 0, group).split(most)
    return torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])


def _scattered_rows(rows: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum over the ranks, outside autograd."""
    most, wide = max(sizes), torch.promote_types(rows.dtype, torch.float32)
    padded = rows.new_zeros(len(sizes), most, *rows.shape[1:], dtype=wide)
    for block, own in zip(padded, rows.split(sizes), strict=True):
        block[: len(own)] = own
    return raw_reduce_scatter(padded.flatten(0, 1), 0, group)[: sizes[group.rank()]].to(rows.dtype)


def _gradient(ctx: Any, grad: Tensor | None) -> Tensor:
    """The gradient of what came, which the others are told of before it is sent."""
    gradient, of = gradient_of(ctx, grad), ctx.message[-1]
    if of is not None:
        of[0].differentiate(of[1], gradient.device)
    return gradient


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, *message: Any) -> tuple[Tensor, Tensor]:
        sizes, group, _ = ctx.message = message
        return leave(ctx, gathered_rows(rows, sizes, group), anchor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        return scatter_rows(_gradient(ctx, grad), *ctx.message), None, None, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, *message: Any) -> tuple[Tensor, Tensor]:
        sizes, group, _ = ctx.message = message
        return leave(ctx, _scattered_rows(rows, sizes, group), anchor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        return gather_rows(_gradient(ctx, grad), *ctx.message), None, None, None, None
