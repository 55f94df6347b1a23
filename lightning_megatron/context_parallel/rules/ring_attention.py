"""Attention around a ring: this rank's queries meet the keys and values of one rank at a time, so none are ever whole.

::

    forward    step 0: own k, v     step 1: those of rank - 1     ...     softmax merged from step to step
    backward   the same again, from the forward's sums; dk, dv travel one step behind k, v, and one step more, home

Messages are under way while a step computes: the keys and values of the next one, and the sums of dk and dv that the
step before has left, to which the next rank adds its own when it has them::

    k, v       ──1──▶ ──2──▶ ──3──▶
    compute    step 0  step 1  step 2  step 3  step 0
    dk, dv             ───0──▶ ───1──▶ ───2──▶ ───3──▶ home

In the backward half of step 0 (every other block of a rank's queries and its own keys) is left for the time in which
the last sums come home.

The softmax of a row is merged as in arXiv 1805.02867: m is the highest score so far, l the sum of ``exp(s - m)`` and o
that of ``exp(s - m) v``, all in float32 where queries have 16 bits, and rounded once, as are dk and dv, which travel in
float32 then. A row that sees no key has m = -inf and l = 0, and gives zeros, as torch's attention does. Scores are
those of one block of queries and one of keys at a time; blocks in which no query sees a key are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lightning_megatron.context_parallel.rule_masks import RuleMask, check_unwritten, writes_of
from lightning_megatron.context_parallel.token_split import Run, TokenSplit, after_the_step
from lightning_megatron.mesh.messages.collectives import wait_for
from lightning_megatron.mesh.messages.passed_on import start_rotation

_Pair = tuple[Tensor, Tensor]


class RingCall(NamedTuple):
    """How to attend.

    Attributes:
        split: of queries and keys.
        is_causal: whether a query sees the tokens up to its own only.
        scale: factor of the scores.
        rule: the mask, where it is one.
        shared: whether scores have a dim in front of the queries for those that share a head of keys.
    """

    split: TokenSplit
    is_causal: bool
    scale: float
    rule: RuleMask | None = None
    shared: bool = False

    def tiles(
        self, mask: Tensor | None, owner: int, half: int | None = None
    ) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Blocks of this rank's queries and of ``owner``'s keys in which a query sees a key.

        Args:
            mask: [.., rows, tokens] of this rank's rows, as torch's attention takes it; ``None`` hides nothing.
            owner: whose keys are here.
            half: 0 or 1 for every other block only, from the first or from the second on.

        Yields:
            Where the queries lie among the rows, the keys among those of ``owner``, and the mask of the two: ``True``
            where a key is seen, or what is added to scores.
        """
        seen = 0
        for start, stop, rows in _blocks(self.split.mine):
            for low, high, keys in _blocks(self.split.runs[owner]):
                if self.is_causal and low >= stop:
                    continue
                seen += 1
                if half is not None and seen % 2 == half:
                    continue
                added = None
                if self.rule is not None:
                    sees = self.rule.sees(start, stop, low, high)
                    if sees is False:
                        continue
                    if sees is None:
                        added = self.rule.part(start, stop, low, high)
                        added = added.unsqueeze(-3) if self.shared else added
                elif mask is not None:
                    own = mask if mask.shape[-2] == 1 else mask[..., rows, :]
                    added = own[..., low:high] if mask.shape[-1] > 1 else own
                    if not bool(added.any() if added.dtype == torch.bool else (added != -math.inf).any()):
                        continue
                elif self.is_causal and high > start + 1:
                    added = torch.arange(low, high) <= torch.arange(start, stop)[:, None]
                yield rows, keys, added


BLOCK = 512
"""Queries, and keys, whose scores are there at a time."""


def _blocks(runs: Sequence[Run]) -> Iterator[tuple[int, int, slice]]:
    """First token, the one past the last, and the place among the rows, of every block of some runs."""
    behind = 0
    for start, stop in runs:
        for first in range(start, stop, BLOCK):
            last = min(first + BLOCK, stop)
            yield first, last, slice(behind + first - start, behind + last - start)
        behind += stop - start


class Ring(torch.autograd.Function):
    """query: [.., rows, d], key: [.., rows, d], value: [.., rows, e] of this rank -> [.., rows, e].

    Leading dims of key and value may be of size one where those of the query are not.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: RingCall) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        highest = query.new_full((*query.shape[:-1], 1), -math.inf, dtype=wide)
        total, found = torch.zeros_like(highest), highest.new_zeros((*query.shape[:-1], value.shape[-1]))
        pair = key, value
        for owner, is_last in _owners(call.split):
            coming = _kept(pair) if is_last else _pass_on(pair, call.split, owner)
            for rows, keys, added in call.tiles(mask, owner):
                scores = _scores(query[..., rows, :], pair[0][..., keys, :], added, call.scale)
                before = highest[..., rows, :]
                now = torch.maximum(before, scores.amax(-1, keepdim=True))
                base = now.masked_fill(now == -math.inf, 0.0)
                weights, kept = (scores - base).exp(), (before - base).exp()
                highest[..., rows, :] = now
                total[..., rows, :] = total[..., rows, :] * kept + weights.sum(-1, keepdim=True)
                found[..., rows, :] = found[..., rows, :] * kept + weights @ pair[1][..., keys, :].to(wide)
            pair = coming()
        found = like_torchs(found.div_(total.masked_fill(total == 0.0, 1.0)))
        ctx.save_for_backward(query, key, value, mask, found, highest + total.log())
        ctx.call, ctx.scope, ctx.writes = call, call.split.scope, writes_of(call.rule)
        return found.to(query.dtype)

    @staticmethod
    @after_the_step
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, mask, found, level = ctx.saved_tensors
        call: RingCall = ctx.call
        check_unwritten(call.rule, ctx.writes)
        level = level.masked_fill(level == -math.inf, math.inf)  # a row that sees no key has weights of zero
        wide = found.dtype
        grad = grad.to(wide)
        share = (grad * found).sum(-1, keepdim=True)
        into = torch.zeros_like(query, dtype=wide)

        def meet(pair: _Pair, owner: int, half: int | None = None) -> _Pair:
            back = torch.zeros_like(pair[0], dtype=wide), torch.zeros_like(pair[1], dtype=wide)
            for rows, keys, added in call.tiles(mask, owner, half):
                q, g = query[..., rows, :].to(wide), grad[..., rows, :]
                k, v = pair[0][..., keys, :].to(wide), pair[1][..., keys, :].to(wide)
                weights = (_scores(q, k, added, call.scale) - level[..., rows, :]).exp()
                slopes = weights * (g @ v.mT - share[..., rows, :]) * call.scale
                into[..., rows, :] += slopes @ k
                back[0][..., keys, :] += (slopes.mT @ q).sum_to_size(k.shape)
                back[1][..., keys, :] += (weights.mT @ g).sum_to_size(v.shape)
            return back

        pair, left = (key, value), cast("Callable[[], tuple[Tensor, ...]]", tuple)  # by the step before: nothing
        mine = call.split.group.rank()
        for owner, is_last in _owners(call.split):
            coming = _kept(pair) if is_last else _pass_on(pair, call.split, owner)
            back = meet(pair, owner, 0 if owner == mine else None)
            for own, part in zip(back, left(), strict=False):
                own.add_(part)
            left, pair = _pass_on(back, call.split, owner), coming()
        rest = meet((key, value), mine, 1)  # while the sums come home
        sums = [own.add_(part) for own, part in zip(rest, left(), strict=True)]
        return into.to(query.dtype), *(part.to(query.dtype) for part in sums), None, None


def like_torchs(found: Tensor) -> Tensor:
    """The same with the heads after the rows in memory, so that joining the heads makes no copy."""
    return found.movedim(-2, 1).contiguous().movedim(1, -2) if found.ndim > 3 else found


def _owners(split: TokenSplit) -> Iterator[tuple[int, bool]]:
    """The rank whose keys are here, step by step, and whether the step is the last one."""
    rank, size = split.group.rank(), split.group.size()
    return ((((rank - step) % size), step == size - 1) for step in range(size))


def _scores(query: Tensor, key: Tensor, added: Tensor | None, scale: float) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(wide) @ key.to(wide).mT) * scale
    if added is not None and added.dtype == torch.bool:
        return scores.masked_fill_(~added.to(scores.device), -math.inf)
    return scores if added is None else scores + added.to(scores)


def _pass_on(pair: _Pair, split: TokenSplit, owner: int) -> Callable[[], _Pair]:
    """Send a pair, of ``owner``'s tokens, in one message to the next rank; gives what waits for the rank before's."""
    if split.group.size() == 1:
        return _kept(pair)
    rows, group = split.counts[(owner - 1) % split.group.size()], split.group
    sent = torch.cat(pair, -1).movedim(-2, 0).contiguous()
    arrived, under_way = start_rotation(sent, rows, group)

    def wait() -> _Pair:
        for work in under_way:
            wait_for(work, "rotate", sent, group)
        width, found = pair[0].shape[-1], arrived.movedim(0, -2)
        return found[..., :width], found[..., width:]

    return wait


def _kept(pair: _Pair) -> Callable[[], _Pair]:
    """No message after the last step."""
    return lambda: pair


def ring(split: TokenSplit, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Attention of this rank's queries to all keys, as ``F.scaled_dot_product_attention`` computes it.

    Args:
        split: of the tokens.
        query: [.., heads, rows, d] of this rank.
        key: [.., heads or fewer, rows, d]
        value: [.., heads or fewer, rows, e]
        mask: [.., rows, tokens] of this rank's rows, ``True`` where a query sees a key or a number that is added;
            without a gradient.
        options: ``is_causal``, ``scale`` and ``enable_gqa``.
    """
    scale = options.get("scale")
    call = RingCall(split, bool(options.get("is_causal")), query.shape[-1] ** -0.5 if scale is None else scale)
    if isinstance(mask, RuleMask):
        call, mask = call._replace(rule=mask), None
    if not options.get("enable_gqa") or key.shape[-3] == query.shape[-3]:
        return cast(Tensor, Ring.apply(query, key, value, mask, call))
    shared = key.shape[-3], query.shape[-3] // key.shape[-3]  # heads of keys, and queries that share each
    if mask is not None and mask.ndim > 2:
        mask = mask.unflatten(-3, shared) if mask.shape[-3] == query.shape[-3] else mask.unsqueeze(-3)
    call = call._replace(shared=True)
    found = Ring.apply(query.unflatten(-3, shared), key.unsqueeze(-3), value.unsqueeze(-3), mask, call)
    return cast(Tensor, found).flatten(-4, -3)
