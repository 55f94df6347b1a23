"""Operations on logits before a loss asks for them: views of tokens, and functions of each token's classes."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.layers.pieces.head_rows import VALUES, HeadRows
from lightning_megatron.layers.pieces.lazy_logits import LazyLogits
from lightning_megatron.layers.pieces.token_pieces import RULES as LOSSES
from lightning_megatron.layers.whole import NeedsWhole, Rule, WholeTensor
from lightning_megatron.layers.whole.graph import RULES as GRAPH
from lightning_megatron.layers.whole.pointwise import RULES as POINTWISE
from lightning_megatron.layers.whole.views import RULES as VIEWS
from lightning_megatron.mesh.torch_functions import getters


def _note(func: Any, *args: Any, **kwargs: Any) -> LazyLogits:
    """A pointwise function, whose further operands are alike for all tokens."""
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, LazyLogits)]
    if len(given) != 1:
        raise NeedsWhole
    model = given[0]

    def operand(value: Any) -> Any:
        if value is model:
            return VALUES
        return _of_classes(model, value) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(operand, (args, kwargs))
    return _shown(model, model.head.then(func, *args, **kwargs))


def _of_classes(model: LazyLogits, value: Tensor) -> Tensor:
    """An operand as it meets one token's classes: a number, or [classes]."""
    dim = value.ndim - (model.ndim - model.along)
    sizes = [size for place, size in enumerate(value.shape) if place != dim]
    if isinstance(value, WholeTensor) or value.ndim > model.ndim or any(size != 1 for size in sizes):
        raise NeedsWhole
    return value if value.ndim == 0 else value.reshape(-1)


def _shown(model: LazyLogits, head: HeadRows) -> LazyLogits:
    rows = model.local()
    own = rows.local() if isinstance(rows, WholeTensor) else rows
    if model.along != model.ndim - 1:
        own = own.movedim(model.along, -1)
    model.head.shown[0] += 1
    return LazyLogits.show(rows, head.settled(own), model.along)


def _softmax(func: Any, model: Any, dim: Any = None, *args: Any, **kwargs: Any) -> LazyLogits:
    """``softmax`` and ``log_softmax`` over classes."""
    kwargs.pop("_stacklevel", None)
    dtype = kwargs.pop("dtype", args[-1] if args and isinstance(args[-1], torch.dtype) else None)
    if not isinstance(model, LazyLogits) or type(dim) is not int or dim % model.ndim != model.along or kwargs:
        raise NeedsWhole
    return _shown(model, model.head.then(getattr(torch, func.__name__), VALUES, -1, dtype=dtype))


def _same(func: Any, model: LazyLogits, *args: Any, **kwargs: Any) -> LazyLogits:
    """Copies: the logits do not exist yet."""
    if args or kwargs:
        raise NeedsWhole
    return model if func is T.contiguous else _shown(model, model.head.then(T.clone, VALUES))


def _detach(func: Any, model: LazyLogits) -> LazyLogits:
    with torch.no_grad():
        detached = model.local().detach()
    head = model.head.then(T.detach, VALUES)
    own = detached.local() if isinstance(detached, WholeTensor) else detached
    own = own if model.along == model.ndim - 1 else own.movedim(model.along, -1)
    model.head.shown[0] += 1
    return LazyLogits.show(detached, head.settled(own), model.along)


def _called_otherwise(rule: Rule) -> Rule:
    """The rule, which leaves calls that name arguments in a way it does not know to the whole logits."""

    @functools.wraps(rule)
    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            inspect.signature(rule).bind(func, *args, **kwargs)
        except TypeError as error:
            raise NeedsWhole from error
        return rule(func, *args, **kwargs)

    return run


T = Tensor
_NOTED = [func for func, rule in POINTWISE.items() if rule.__name__ in ("_pointwise", "_cast")]
_COPIES = (T.contiguous, T.clone, torch.clone)
_MORE = (T.__abs__, torch.where, T.clip, torch.clip, torch.nan_to_num, T.nan_to_num, torch.multiply, torch.divide)
_RULES: dict[Any, Rule] = {
    **VIEWS,
    **dict.fromkeys((*_NOTED, *_MORE), _note),
    **dict.fromkeys(_COPIES, _same),
    **dict.fromkeys((T.detach, torch.detach), _detach),
    **dict.fromkeys((T.softmax, torch.softmax, F.softmax, T.log_softmax, torch.log_softmax, F.log_softmax), _softmax),
    **{func: GRAPH[func] for func in (*getters("requires_grad", "grad_fn", "is_leaf"), T.__format__)},
    **LOSSES,
}
LazyLogits.rules = {func: _called_otherwise(rule) for func, rule in _RULES.items()}
