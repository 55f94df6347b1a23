"""Attention of this rank's queries to all keys: ``F.scaled_dot_product_attention``, and torch's multi-head attention.

Keys and values are gathered, queries stay. Each run of queries attends, under a causal mask, to the keys up to its end
only, so that a rank's work is that of its tokens; with two runs per rank (zigzag) all ranks have the same. Between
forward and backward only this rank's rows are kept::

    forward    gather K, V    attend                        keep own q, k, v
    backward   gather K, V    attend again, differentiate   reduce-scatter dK, dV
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.context_parallel import rule_masks
from lightning_megatron.context_parallel.rule_masks import RuleMask, check_unwritten, writes_of
from lightning_megatron.context_parallel.rules.head_attention import by_heads
from lightning_megatron.context_parallel.rules.ring_attention import ring
from lightning_megatron.context_parallel.rules.token_products import whole
from lightning_megatron.context_parallel.rules.token_views import split_of
from lightning_megatron.context_parallel.token_split import Run, TokenSplit, after_the_step
from lightning_megatron.layers.whole import NeedsWhole, Rule, WholeTensor


class _Block(NamedTuple):
    """Some of this rank's queries, the keys that they see, and the mask between the two."""

    rows: slice
    keys: slice
    mask: Tensor | None


class _Call(NamedTuple):
    """How to attend: torch's function and its options, and whose queries and keys these are.

    Attributes:
        gathers: whether keys and values come as this rank's rows.
        rule: the mask, where it is one.
    """

    func: Callable[..., Tensor]
    queries: Sequence[Run]
    keys: TokenSplit
    is_causal: bool
    options: Mapping[str, Any]
    gathers: bool = True
    rule: RuleMask | None = None

    def blocks(self, mask: Tensor | None, tokens: int) -> Iterator[_Block]:
        """Blocks of queries, as few as leave of a mask `AT_A_TIME` entries; ``tokens`` is the number of keys."""
        if self.rule is None and not self.is_causal:
            yield _Block(slice(None), slice(0, tokens), mask)
            return
        step, behind = max(1, rule_masks.AT_A_TIME // max(1, tokens)), 0
        for first, last in self.queries:
            for start in range(first, last, step):
                stop = min(start + step, last)
                rows = slice(behind + start - first, behind + stop - first)
                if self.rule is not None:
                    yield _Block(rows, *self._by_rule(self.rule, start, stop, tokens))
                    continue
                seen = min(stop, tokens)
                places = torch.arange(max(stop, seen))
                yield _Block(rows, slice(0, seen), places[start:stop, None] >= places[:seen])
            behind += last - first

    @staticmethod
    def _by_rule(rule: RuleMask, start: int, stop: int, tokens: int) -> tuple[slice, Tensor | None]:
        """The keys from the first to the last that any of these queries sees, and their mask."""
        tiles = [(low, min(low + TILE, tokens)) for low in range(0, tokens, TILE)]
        sees = [rule.sees(start, stop, *tile) for tile in tiles]
        met = [index for index, seen in enumerate(sees) if seen is not False] or [0]
        keys = slice(tiles[met[0]][0], tiles[met[-1]][1])
        if all(seen is True for seen in sees[met[0] : met[-1] + 1]):
            return keys, None
        return keys, rule.part(start, stop, keys.start, keys.stop)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Output of this rank's queries. query: [.., rows, d]; keys: [.., tokens, d]; mask: [.., rows, tokens]."""
        found = [self.meet(block, query, keys, values) for block in self.blocks(mask, keys.shape[-2])]
        if not found:  # no queries here
            found = [self.meet(_Block(slice(None), slice(None), None), query, keys, values)]
        return found[0] if len(found) == 1 else torch.cat(found, -2)

    def meet(self, block: _Block, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Output of a block of queries."""
        mask = None if block.mask is None else block.mask.to(query.device)
        operands = query[..., block.rows, :], keys[..., block.keys, :], values[..., block.keys, :]
        return self.func(*operands, attn_mask=mask, **self.options)

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all ranks, in one message where they have one shape but for the last dim."""
        if not self.gathers:
            return key, value
        if key.shape[:-1] != value.shape[:-1]:
            return self.keys.gathered(key, key.ndim - 2), self.keys.gathered(value, value.ndim - 2)
        both = self.keys.gathered(torch.cat([key, value], -1), key.ndim - 2)
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]

    def scatter(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The sums over the ranks of gradients of keys and values, for this rank's rows."""
        if not self.gathers:
            return key, value
        if key.shape[:-1] != value.shape[:-1]:
            return self.keys.scattered(key, key.ndim - 2), self.keys.scattered(value, value.ndim - 2)
        both = self.keys.scattered(torch.cat([key, value], -1), key.ndim - 2)
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]


TILE = 512
"""Keys of which a rule is asked at once whether a block of queries sees any."""


class _Attend(torch.autograd.Function):
    """Attention that keeps its operands only, and attends again in the backward, one block of queries at a time."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: _Call) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.call, ctx.scope, ctx.writes = call, call.keys.scope, writes_of(call.rule)
        return call.attend(query, *call.gather(key, value), mask)

    @staticmethod
    @after_the_step
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, mask = ctx.saved_tensors
        call: _Call = ctx.call
        check_unwritten(call.rule, ctx.writes)
        keys, values = call.gather(key, value)
        sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (keys, values)]
        into = torch.zeros_like(query)
        for block in call.blocks(mask, keys.shape[-2]):
            parts = query[..., block.rows, :], keys[..., block.keys, :], values[..., block.keys, :]
            leaves = [part.detach().requires_grad_() for part in parts]
            everything = block._replace(rows=slice(None), keys=slice(None))
            with torch.enable_grad():
                found = call.meet(everything, *leaves)
            into[..., block.rows, :], *met = torch.autograd.grad(found, leaves, grad[..., block.rows, :])
            for total, part in zip(sums, met, strict=True):
                total[..., block.keys, :] += part
        del keys, values
        scattered = (total.to(x.dtype) for total, x in zip(call.scatter(*sums), (key, value), strict=True))
        return into, *scattered, None, None


def _attention(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    if not isinstance(query, WholeTensor) or query.along != query.ndim - 2:
        raise NeedsWhole
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and not dropout_p:  # the backward attends again, outside of it
        dtype = torch.get_autocast_dtype(kind)
        query, key, value, attn_mask = (_as_autocast(x, dtype) for x in (query, key, value, attn_mask))
        with torch.autocast(kind, enabled=False):
            return _attention(func, query, key, value, attn_mask, 0.0, is_causal, **options)
    if (instead := split_of(query).scope.attention) is not None:
        options |= {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        return instead(_attention, func, query, key, value, **options)
    if dropout_p:
        raise NeedsWhole
    if attn_mask is not None and is_causal:
        raise NeedsWhole  # torch says what is wrong with that
    keys = split_of(key if isinstance(key, WholeTensor) else query)
    keys.check_mixes()
    split = isinstance(key, WholeTensor) and isinstance(value, WholeTensor) and key.spread == value.spread
    split = split and key.along == key.ndim - 2 and value.along == value.ndim - 2
    alike = split and key.spread == query.spread and key.shape[:-1] == value.shape[:-1]
    alike = alike and query.ndim == key.ndim > 3 and key.shape[:-3] == query.shape[:-3]
    method = keys.scope.method if alike else "gather"
    if method == "ulysses" and not (keys.scope.levels and isinstance(attn_mask, Tensor) and attn_mask.requires_grad):
        keys.scope.attended[method] += 1
        rows, options["is_causal"] = (query.local(), key.local(), value.local()), is_causal
        if isinstance(attn_mask, RuleMask) and keys.scope.levels is None:
            if attn_mask.numel() <= rule_masks.AT_A_TIME:
                attn_mask = attn_mask.whole("attention by heads")
            else:
                func = functools.partial(_by_blocks, func, keys)
        return query.like(by_heads(func, keys, *rows, None if attn_mask is None else whole(attn_mask), **options))
    mask = None if attn_mask is None else _own_rows(query, attn_mask)
    trained = mask is not None and mask.requires_grad
    if method == "ring" and not trained:
        keys.scope.attended[method] += 1
        options["is_causal"] = is_causal
        return query.like(ring(keys, query.local(), key.local(), value.local(), mask, **options))
    keys.scope.attended["gather"] += 1
    call = _Call(func, split_of(query).mine, keys, is_causal, options)
    if isinstance(mask, RuleMask):
        call, mask = call._replace(rule=mask, gathers=bool(split)), None
        operands = (key.local(), value.local()) if split else (whole(key), whole(value))
        return query.like(_Attend.apply(query.local(), *operands, mask, call))
    if split and not trained:
        return query.like(_Attend.apply(query.local(), key.local(), value.local(), mask, call))
    return query.like(call.attend(query.local(), whole(key), whole(value), mask))


def _by_blocks(
    func: Any, split: TokenSplit, query: Tensor, key: Tensor, value: Tensor, attn_mask: RuleMask, **options: Any
) -> Tensor:
    """Attention of some heads and all tokens, a block of queries at a time."""
    options.pop("is_causal")  # which nothing is with a mask
    call = _Call(func, ((0, split.length),), split, False, options, gathers=False, rule=attn_mask)
    return cast(Tensor, _Attend.apply(query, key, value, None, call))


def _as_autocast(value: Any, dtype: torch.dtype) -> Any:
    """A tensor of numbers as autocast gives it to torch's attention; anything else as it is."""
    numbers = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if numbers else value


def _own_rows(query: WholeTensor, mask: Any) -> Tensor:
    """The rows of a mask [.., queries, keys] that belong to this rank's queries."""
    if isinstance(mask, WholeTensor):
        if mask.spread == query.spread and mask.along == mask.ndim - 2:
            return mask.local()
        mask = mask.full()
    if isinstance(mask, RuleMask):
        return mask
    if mask.ndim < 2 or mask.shape[-2] == 1:
        return mask
    if mask.requires_grad:
        return query.spread.take(mask, mask.ndim - 2, 0)
    kept, key = split_of(query).scope.rows, (mask._version, split_of(query))
    if mask not in kept or kept[mask][0] != key:
        kept[mask] = key, query.spread.take(mask, mask.ndim - 2, 0)
    return cast(Tensor, kept[mask][1])


_PLAIN = ("bias_k", "bias_v", "static_k", "static_v", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def _multi_head(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Self-attention of ``nn.MultiheadAttention`` without its weights: [tokens, batch, width]."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    x = given["query"]
    if not isinstance(x, WholeTensor) or x is not given["key"] or x is not given["value"] or x.ndim != 3:
        raise NeedsWhole
    if given["need_weights"] or given["add_zero_attn"] or (given["training"] and given["dropout_p"]):
        raise NeedsWhole
    if x.along == 2 or any(given[name] is not None for name in _PLAIN):
        raise NeedsWhole
    tokens, batch, width = x.shape
    heads = int(given["num_heads"])
    packed = F.linear(x, given["in_proj_weight"], given["in_proj_bias"])
    q, k, v = (part.unflatten(-1, (heads, width // heads)).permute(1, 2, 0, 3) for part in packed.chunk(3, -1))
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    causal = bool(given["is_causal"]) and padding is None
    merged = None if causal or mask is None else _added(mask, x.dtype)
    if merged is not None and merged.ndim == 3:
        merged = merged.view(batch, heads, *merged.shape[1:])
    if padding is not None:
        keys = _added(padding, x.dtype)[:, None, None, :]
        merged = keys if merged is None else merged + keys
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=merged, is_causal=causal)
    flat = found.permute(2, 0, 1, 3).reshape(tokens, batch, width)
    return F.linear(flat, given["out_proj_weight"], given["out_proj_bias"]), None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as it is added to scores; ``True`` hides a key here."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


RULES: dict[Any, Rule] = {
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
}
