"""Rules for joining tensors along dims other than that of the tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.context_parallel.rules.elementwise import rows_of
from lightning_megatron.layers.whole import NeedsWhole, Rule, WholeTensor


def _join(func: Any, parts: Any, *args: Any, **kwargs: Any) -> Any:
    """``cat`` and ``stack``; a whole tensor among the parts is cut to this rank's rows."""
    dim = kwargs.get("dim", kwargs.get("axis", args[0] if args else 0))
    first = next(part for part in parts if isinstance(part, WholeTensor))
    stacked = func is torch.stack
    if not isinstance(dim, int) or "out" in kwargs:
        raise NeedsWhole
    dim %= first.ndim + stacked
    if not stacked and dim == first.along:
        filled = [part for part in parts if part.numel()]
        if len(parts) > 1 and len(filled) == 1 and isinstance(filled[0], WholeTensor):  # an empty cache of keys
            return filled[0].like(filled[0].local().clone())
        raise NeedsWhole
    place = first.along - first.ndim
    if any(part.ndim != first.ndim or part.shape[place] != first.shape[place] for part in parts):
        raise NeedsWhole
    rows = [rows_of(first, part, place) for part in parts]
    if any(part.shape[place] != first.local().shape[place] for part in rows):
        raise NeedsWhole
    return first.like(func(rows, dim), first.along + (stacked and dim <= first.along))


def _repeat(func: Any, model: Any, repeats: Any, dim: Any = None, **kwargs: Any) -> Any:
    """``repeat_interleave`` along another dim, by a number."""
    if not isinstance(model, WholeTensor) or type(repeats) is not int or type(dim) is not int or kwargs:
        raise NeedsWhole
    if dim % model.ndim == model.along:
        raise NeedsWhole
    return model.like(func(model.local(), repeats, dim))


T = Tensor
RULES: dict[Any, Rule] = {
    **dict.fromkeys((torch.cat, torch.concat, torch.stack), _join),
    **dict.fromkeys((T.repeat_interleave, torch.repeat_interleave), _repeat),
}
