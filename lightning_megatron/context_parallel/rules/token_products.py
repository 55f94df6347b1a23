"""Rules for matrix products: of rows with weights, of rows with all rows (attention by hand), and over tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.context_parallel.rules.elementwise import rows_of
from lightning_megatron.layers.whole import NeedsWhole, Rule, WholeTensor

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def whole(value: Any) -> Any:
    """An operand of which every row is needed, gathered."""
    return value.full() if isinstance(value, WholeTensor) else value


def _linear(func: Any, model: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(model, WholeTensor) or model.along == model.ndim - 1:
        raise NeedsWhole
    if isinstance(weight, WholeTensor) or isinstance(bias, WholeTensor):
        raise NeedsWhole
    return model.like(func(model.local(), weight, bias))


def _matmul(func: Any, left: Any, right: Any) -> Any:
    if left.ndim < 2 or right.ndim < 2:
        raise NeedsWhole
    rows = isinstance(left, WholeTensor)
    if rows and left.along == left.ndim - 2:
        found = func(left.local(), whole(right))
        return left.like(found, found.ndim - 2)
    if rows and left.along == left.ndim - 1:
        return _over_tokens(func, left, right)
    if rows and left.along < left.ndim - 2:
        return _in_batches(func, left, right, left)
    if isinstance(right, WholeTensor) and right.along == right.ndim - 1:
        found = func(whole(left), right.local())
        return right.like(found, found.ndim - 1)
    if isinstance(right, WholeTensor) and right.along < right.ndim - 2:
        return _in_batches(func, left, right, right)
    raise NeedsWhole


def _in_batches(func: Any, left: Any, right: Any, model: WholeTensor) -> Any:
    """Products of a matrix per token."""
    place = model.along - model.ndim
    found = func(rows_of(model, left, place), rows_of(model, right, place))
    if found.shape[place] != model.local().shape[place] or model.spread.length == 1:
        raise NeedsWhole
    return model.like(found, found.ndim + place)


def _over_tokens(func: Any, left: WholeTensor, right: Any) -> Any:
    """A sum over the tokens: each rank adds up its own."""
    if not isinstance(right, WholeTensor) or right.spread != left.spread or right.along != right.ndim - 2:
        raise NeedsWhole
    if left.dtype in _SIXTEEN_BIT:
        raise NeedsWhole
    return left.spread.summed(func(left.local(), right.local()))


def _addmm(func: Any, bias: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    if not isinstance(left, WholeTensor) or isinstance(right, WholeTensor) or left.along != 0 or "out" in kwargs:
        raise NeedsWhole
    return left.like(func(rows_of(left, bias, -2), left.local(), right, **kwargs))


def _baddbmm(func: Any, bias: Any, batch1: Any, batch2: Any, **kwargs: Any) -> Any:
    if not isinstance(batch1, WholeTensor) or batch1.along != 1 or "out" in kwargs:
        raise NeedsWhole
    return batch1.like(func(rows_of(batch1, bias, -2), batch1.local(), whole(batch2), **kwargs), 1)


def _embedding(func: Any, index: Any, weight: Any, padding_idx: int | None = None, *rest: Any, **options: Any) -> Any:
    if not isinstance(index, WholeTensor) or isinstance(weight, WholeTensor):
        raise NeedsWhole
    if any(rest) or any(options.values()):  # norms and frequencies are those of all tokens
        raise NeedsWhole
    return index.like(func(index.local(), weight, padding_idx))


T = Tensor
RULES: dict[Any, Rule] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm, torch.bmm, T.bmm), _matmul),
    **dict.fromkeys((torch.addmm, T.addmm), _addmm),
    **dict.fromkeys((torch.baddbmm, T.baddbmm), _baddbmm),
    F.embedding: _embedding,
}
