"""Rules for functions that treat every element alike, and for those that only change dtype, device or memory.

Padding takes no part: zeros there would turn into infinities (``log``) whose gradients are not numbers. A further
operand (a bias, a mask) is cut to the indices held here and its gradient gathered; one that all indices share
gets the sum of the ranks' gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_megatron.layers.whole.base import NeedsWhole, Rule, WholeTensor


def first_whole(values: Any) -> WholeTensor:
    """The first split tensor among the arguments of a function."""
    return next(value for value in values if isinstance(value, WholeTensor))


def operand(model: WholeTensor, value: Any) -> Any:
    """The held part of an operand that is broadcast against the held part of ``model``.

    Raises:
        NeedsWhole: the operand has more dims, or is cut in another way.
    """
    if not isinstance(value, Tensor):
        return value
    if value.ndim > model.ndim:
        raise NeedsWhole
    dim = value.ndim - (model.ndim - model.along)
    if isinstance(value, WholeTensor):
        blocks = value.local().shape[value.along], model.local().shape[model.along]
        if value.spread != model.spread or value.along != dim or blocks[0] != blocks[1]:
            raise NeedsWhole
        return value.held()
    if dim < 0 or value.shape[dim] == 1:
        return model.spread.shared(value)
    return model.part_of(value, dim)


def _pointwise(func: Any, *args: Any, **kwargs: Any) -> WholeTensor:
    model = first_whole(args)
    parts, options = tree_map(lambda value: operand(model, value), (args, kwargs))
    held = func(*parts, **options)
    if not isinstance(held, Tensor) or held.shape != model.held().shape:  # `torch.where` alone gives places
        raise NeedsWhole
    return model.from_held(held)


def _in_place(func: Any, model: Any, *args: Any, **kwargs: Any) -> WholeTensor:
    if not isinstance(model, WholeTensor):
        raise NeedsWhole
    parts, options = tree_map(lambda value: operand(model, value), (args, kwargs))
    func(model.held(), *parts, **options)
    model.changed()
    return model


def _cast(func: Any, model: Any, *args: Any, **kwargs: Any) -> WholeTensor:
    """Functions that may return the same memory, padding included."""
    if not isinstance(model, WholeTensor) or "memory_format" in kwargs:
        raise NeedsWhole
    args, kwargs = tree_map(lambda v: v.local() if isinstance(v, WholeTensor) else v, (args, kwargs))
    return model.like(func(model.local(), *args, **kwargs))


T = Tensor
_CASTS = (
    *(T.float, T.double, T.half, T.bfloat16, T.to, T.type_as, T.contiguous, T.clone, T.detach, T.cpu, T.cuda),
    *(torch.clone, torch.detach),
)
_ARITHMETIC = (
    *(T.mul, T.div, T.add, T.sub, T.true_divide, T.neg, T.__neg__, T.pow, T.__pow__, T.__rpow__),
    *(T.__mul__, T.__rmul__, T.__truediv__, T.__rtruediv__, T.__add__, T.__radd__, T.__sub__, T.__rsub__),
    *(torch.mul, torch.div, torch.true_divide, torch.add, torch.sub, torch.rsub, torch.neg, torch.pow, torch.lerp),
)
_FUNCTIONS = (
    *(T.abs, T.clamp, T.exp, T.log, T.log1p, T.relu, T.sigmoid, T.sqrt, T.square, T.tanh, T.where, T.masked_fill),
    *(torch.abs, torch.clamp, torch.exp, torch.log, torch.log1p, torch.relu, torch.sigmoid, torch.sqrt, torch.square),
    *(torch.tanh, torch.where, torch.masked_fill, F.gelu, F.logsigmoid, F.sigmoid, F.silu, F.softplus, F.tanh),
)
_IN_PLACE = (
    *(T.mul_, T.div_, T.add_, T.sub_, T.neg_, T.tanh_, T.clamp_, T.clamp_max_, T.clamp_min_, T.exp_, T.masked_fill_),
    *(T.zero_, T.fill_, T.__imul__, T.__itruediv__, T.__iadd__, T.__isub__),
)
RULES: dict[Any, Rule] = {
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys((*_ARITHMETIC, *_FUNCTIONS), _pointwise),
    **dict.fromkeys(_IN_PLACE, _in_place),
}
