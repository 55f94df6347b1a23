"""Attention by heads: ranks exchange tokens for heads, attend to whole sequences, and exchange back (arXiv 2309.14509).

::

    rank 0   tokens 0 1, heads a b                    head a, tokens 0 1 2 3
    rank 1   tokens 2 3, heads a b     exchange ──▶   head b, tokens 0 1 2 3     attend, exchange back

Torch's attention runs as it is, so any mask, bias, window or kernel does. An exchange is undone by its inverse, which
is its adjoint as well. The output, which both attention and the layer after it save, is kept once, as rows; see
`.kept_rows`.

Over two levels the ranks of a node share the heads, and nodes pass keys and values around a ring (arXiv 2405.07719)::

    rank 0   tokens 0 7, heads a b     exchange ──▶   head a, tokens 0 1 6 7 ┐
    rank 1   tokens 1 6, heads a b     with 0, 1      head b, tokens 0 1 6 7 │┐
    rank 2   tokens 2 5, heads a b     exchange ──▶   head a, tokens 2 3 4 5 ┘│  a ring of ranks 0 and 2,
    rank 3   tokens 3 4, heads a b     with 2, 3      head b, tokens 2 3 4 5  ┘  and one of 1 and 3
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from lightning_megatron.context_parallel.rule_masks import RuleMask
from lightning_megatron.context_parallel.rules.kept_rows import kept_as_rows
from lightning_megatron.context_parallel.rules.ring_attention import like_torchs, ring
from lightning_megatron.context_parallel.token_split import TokenSplit, after_the_step, in_two_levels
from lightning_megatron.mesh.messages.passed_on import raw_all_to_all


def to_heads(x: Tensor, split: TokenSplit) -> Tensor:
    """Of this rank's tokens, all heads; then of its heads, all tokens: [.., h, rows, d] -> [.., h / c, length, d]."""
    size, counts = split.group.size(), split.counts
    blocks = x.unflatten(-3, (size, -1)).movedim(-4, 0)  # [c, .., h / c, rows, d]
    parts = _exchanged(blocks, max(counts), split)
    rows = torch.cat([part.narrow(-2, 0, count) for part, count in zip(parts, counts, strict=True)], -2)
    return rows.index_select(-2, split.order(x.device))


def to_rows(x: Tensor, split: TokenSplit) -> Tensor:
    """The inverse: [.., h / c, length, d] -> [.., h, rows, d]."""
    counts = split.counts
    by_rank = x.index_select(-2, split.order(x.device).argsort()).split(counts, -2)
    most, mine = max(counts), counts[split.group.rank()]
    blocks = torch.stack([_padded(part, most) for part in by_rank])
    return torch.cat([part.narrow(-2, 0, mine) for part in _exchanged(blocks, most, split)], -3)


def _padded(x: Tensor, rows: int) -> Tensor:
    missing = rows - x.shape[-2]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def _exchanged(blocks: Tensor, rows: int, split: TokenSplit) -> tuple[Tensor, ...]:
    """Block r goes to rank r; returns the blocks that have come, by rank. blocks: [c, .., rows, d]"""
    return raw_all_to_all(_padded(blocks, rows).contiguous(), split.group).unbind(0)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: TokenSplit) -> Tensor:
        ctx.split, ctx.scope = split, split.scope
        return to_heads(x, split)

    @staticmethod
    @after_the_step
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return to_rows(grad, ctx.split), None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: TokenSplit) -> Tensor:
        ctx.split, ctx.scope = split, split.scope
        return like_torchs(to_rows(x, split))

    @staticmethod
    @after_the_step
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return to_heads(grad, ctx.split), None


def by_heads(
    func: Callable[..., Tensor],
    split: TokenSplit,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> Tensor:
    """Attention of this rank's queries to all keys.

    Args:
        func: ``F.scaled_dot_product_attention``.
        split: of the tokens; over two levels where its scope has those.
        query: [.., heads, rows, d] of this rank.
        key: [.., heads or fewer, rows, d]
        value: [.., heads or fewer, rows, e]
        mask: whole: [.., tokens, tokens]; over two levels without a gradient.
        options: of torch's function.

    Raises:
        RuntimeError: the heads cannot be shared by the ranks.
    """
    around = None
    if split.scope.levels is not None:
        split, around = in_two_levels(split, *split.scope.levels)
    heads, shared, size, rank = query.shape[-3], key.shape[-3], split.group.size(), split.group.rank()
    if heads % size or (shared % size and size % shared):
        method, ranks = ("'ulysses'", "`context_parallel_size=") if around is None else (f"('ulysses', {size})", "`n=")
        raise RuntimeError(
            f"`context_parallel_options={{'method': {method}}}` cannot divide {heads} heads ({shared} key-value "
            f"heads) among {ranks}{size}` ranks; use 'gather' or 'ring', which do not split heads."
        )
    if shared % size:
        key, value = (x.repeat_interleave(size // shared, -3) for x in (key, value))
    q, k, v = (cast(Tensor, _ToHeads.apply(x, split)) for x in (query, key, value))
    if mask is not None and mask.ndim > 2 and mask.shape[-3] == heads > 1:
        mask = mask.narrow(-3, rank * (heads // size), heads // size)
    if (
        around is not None
        and mask is not None
        and mask.ndim > 1
        and mask.shape[-2] > 1
        and not isinstance(mask, RuleMask)
    ):
        mask = around.take(mask, mask.ndim - 2, 0)

    def attend() -> Tensor:
        if around is not None:
            return ring(around, q, k, v, mask, **options)
        return func(q, k, v, attn_mask=mask, **options)

    return kept_as_rows(attend, lambda x: cast(Tensor, _ToRows.apply(x, split)), lambda rows: to_heads(rows, split))
