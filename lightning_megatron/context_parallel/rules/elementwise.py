"""Rules for functions that treat every token alike: pointwise ones, norms of features, and dropout."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_megatron.context_parallel.rule_masks import RuleMask
from lightning_megatron.context_parallel.token_split import TokenSplit
from lightning_megatron.layers.whole import NeedsWhole, Rule, WholeTensor
from lightning_megatron.layers.whole.pointwise import RULES as POINTWISE
from lightning_megatron.layers.whole.pointwise import first_whole


def rows_of(model: WholeTensor, value: Any, place: int) -> Any:
    """The rows of an operand that are broadcast against this rank's rows of ``model``.

    Args:
        model: cut along ``place``.
        value: an operand; anything but a tensor is returned as it is.
        place: the dim of the tokens, counted from the end (negative).

    Raises:
        NeedsWhole: the operand is cut in another way, or is longer than ``model``.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, WholeTensor):
        if value.spread != model.spread or value.along - value.ndim != place:
            raise NeedsWhole
        return value.local()
    if value.ndim < -place or value.shape[place] == 1:
        return value
    if value.shape[place] != model.spread.length:
        raise NeedsWhole
    if isinstance(value, RuleMask) and place == -2:
        return value.rows(cast(TokenSplit, model.spread).mine)
    return model.spread.take(value, value.ndim + place, 0)


def pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Functions of each number."""
    model = first_whole((*args, *kwargs.values()))
    if isinstance(kwargs.get("out"), Tensor):
        raise NeedsWhole
    place = model.along - model.ndim
    if model.spread.length == 1:  # such a dim may be repeated
        raise NeedsWhole
    parts, options = tree_map(lambda value: rows_of(model, value, place), (args, kwargs))
    if options.get("inplace") is True:
        return _in_place(func, *args, **kwargs)
    found = func(*parts, **options)
    if not isinstance(found, Tensor):  # `torch.where` of a condition alone gives places
        raise NeedsWhole
    return model.like(found, found.ndim + place)


def _in_place(func: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(model, WholeTensor):
        raise NeedsWhole
    place = model.along - model.ndim
    parts, options = tree_map(lambda value: rows_of(model, value, place), (args, kwargs))
    if any(isinstance(part, Tensor) and part.ndim > model.ndim for part in parts):
        raise NeedsWhole
    func(model.local(), *parts, **options)
    model.changed()
    return model


def _over_features(func: Any, model: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Norms over the last dims."""
    if not isinstance(model, WholeTensor) or model.along >= model.ndim - len(tuple(normalized_shape)):
        raise NeedsWhole
    return model.like(func(model.local(), normalized_shape, *args, **kwargs))


def _dropout(func: Any, model: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Every rank draws for all tokens, so that the ranks' random numbers stay alike, and uses its own."""
    if not isinstance(model, WholeTensor):
        raise NeedsWhole
    if not training or p == 0.0:
        return model
    ones = torch.ones(model.shape, dtype=model.dtype, device=model.device)
    factors = model.spread.take_held(func(ones, p, True), model.along, 0)
    if inplace:
        return _in_place(T.mul_, model, model.like(factors))
    return model.like(model.local() * factors)


def _type(func: Any, model: WholeTensor, *args: Any, **kwargs: Any) -> Any:
    """A cast, or the name of the dtype."""
    return model.like(func(model.local(), *args, **kwargs)) if args or kwargs else func(model.local())


T = Tensor
_MORE = (
    *(T.__lt__, T.__gt__, T.__le__, T.__ge__, T.__eq__, T.__ne__, T.lt, T.gt, T.le, T.ge, T.eq, T.ne),
    *(torch.lt, torch.gt, torch.le, torch.ge, torch.eq, torch.ne, torch.isnan, torch.isinf, torch.isfinite),
    *(T.isnan, T.isinf, T.isfinite, T.__and__, T.__or__, T.__xor__, T.__invert__, T.logical_not, T.logical_and),
    *(torch.logical_not, torch.logical_and, torch.logical_or, T.logical_or, T.sin, T.cos, torch.sin, torch.cos),
    *(T.rsqrt, torch.rsqrt, T.reciprocal, torch.reciprocal, T.sign, torch.sign, T.erf, torch.erf),
    *(T.maximum, T.minimum, torch.maximum, torch.minimum, T.fmod, torch.fmod, T.floor, torch.floor, T.round),
    *(torch.round, T.ceil, torch.ceil, T.expm1, torch.expm1, T.log2, torch.log2, T.addcmul, torch.addcmul),
    *(T.__abs__, T.lerp, F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.mish, F.hardtanh, F.hardswish),
    *(F.hardsigmoid, F.softsign, F.tanhshrink, F.threshold, torch._C._nn.gelu, torch._C._nn.silu, torch.relu),
    *(T.clamp_min, T.clamp_max, torch.clamp_min, torch.clamp_max, torch.nan_to_num, T.nan_to_num, T.clip, torch.clip),
    *(torch.zeros_like, torch.ones_like, torch.full_like, T.masked_fill, T.__pos__, T.positive, T.atan2, T.float_power),
    *(torch.subtract, torch.multiply, torch.divide, torch.negative, T.subtract, T.multiply, T.divide, T.__floordiv__),
)
RULES: dict[Any, Rule] = {}
for _func, _rule in POINTWISE.items():
    name = _rule.__name__
    RULES[_func] = {"_pointwise": pointwise, "_in_place": _in_place}.get(name, _rule)
RULES |= dict.fromkeys((func for func in _MORE if not getattr(func, "__name__", "").endswith("_")), pointwise)
RULES |= dict.fromkeys((F.layer_norm, F.rms_norm, torch.rms_norm), _over_features)
RULES |= {F.dropout: _dropout, T.type: _type}
