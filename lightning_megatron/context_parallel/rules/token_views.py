"""Rules for views: of other dims, of a stretch of tokens, and of tokens flattened together with other dims."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from lightning_megatron.context_parallel.rules.elementwise import pointwise
from lightning_megatron.context_parallel.token_split import TokenSplit
from lightning_megatron.layers.whole import NeedsWhole, Rule, WholeTensor
from lightning_megatron.layers.whole.graph import RULES as MEMORY
from lightning_megatron.layers.whole.views import RULES as VIEWS
from lightning_megatron.mesh.torch_functions import getters


def split_of(model: WholeTensor) -> TokenSplit:
    """How the tokens are split."""
    return cast(TokenSplit, model.spread)


def _reshape(func: Any, model: WholeTensor, *args: Any, **kwargs: Any) -> WholeTensor:
    if not isinstance(model, WholeTensor) or any(isinstance(value, torch.dtype) for value in args):
        raise NeedsWhole
    args = tuple(_size_of(value) if isinstance(value, Tensor) else value for value in args)
    old, new = model.shape, func(torch.empty(model.shape, device="meta"), *args, **kwargs).shape
    before, after = old[: model.along].numel(), old[model.along + 1 :].numel()
    for found in (_kept(model, new, before, after), _merged(model, new, before, after), _unmerged(model, new)):
        if found is not None:
            return found
    raise NeedsWhole


def _size_of(value: Tensor) -> Any:
    """A number as which a tensor is given, as `torch.div` makes them; or a tensor whose shape is meant."""
    plain = value.ndim == 0 and not isinstance(value, WholeTensor)
    return int(value) if plain else torch.empty(value.shape, device="meta")


def _kept(model: WholeTensor, new: torch.Size, before: int, after: int) -> WholeTensor | None:
    """The tokens stay a dim of their own."""
    for dim, size in enumerate(new):
        if size == model.shape[model.along] and new[:dim].numel() == before and new[dim + 1 :].numel() == after:
            rows = model.local().shape[model.along]
            return model.like(model.local().reshape(*new[:dim], rows, *new[dim + 1 :]), dim)
    return None


def _merged(model: WholeTensor, new: torch.Size, before: int, after: int) -> WholeTensor | None:
    """The tokens become one dim with dims in front of them or after them: [b, s, h] -> [b * s, h]."""
    for dim, size in enumerate(new):
        outer, inner = new[:dim].numel(), new[dim + 1 :].numel()
        if before == 0 or after == 0 or outer == 0 or inner == 0:
            return None
        if (
            before % outer == 0
            and after % inner == 0
            and size == before // outer * model.spread.length * (after // inner)
        ):
            split = split_of(model).flattened(before // outer, after // inner)
            rows = split.counts[split.group.rank()]
            return model.show(model.local().reshape(*new[:dim], rows, *new[dim + 1 :]), split, dim)
    return None


def _unmerged(model: WholeTensor, new: torch.Size) -> WholeTensor | None:
    """Back from there: [b * s, h] -> [b, s, h]."""
    folded = split_of(model).folded
    if folded is None:
        return None
    before, split, after = folded
    outer, inner = model.shape[: model.along].numel() * before, model.shape[model.along + 1 :].numel() * after
    rows = split.counts[split.group.rank()]
    for dim, size in enumerate(new):
        if size == split.length and new[:dim].numel() == outer and new[dim + 1 :].numel() == inner:
            return model.show(model.local().reshape(*new[:dim], rows, *new[dim + 1 :]), split, dim)
    return None


def _expand(func: Any, model: WholeTensor, *sizes: Any) -> WholeTensor:
    shape = list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Iterable) else sizes)
    dim = len(shape) - model.ndim + model.along
    if shape[dim] not in (-1, model.shape[model.along]):
        raise NeedsWhole
    shape[dim] = model.local().shape[model.along]
    return model.like(model.local().expand(*shape), dim)


def _index(func: Any, model: Any, index: Any) -> Any:
    """Indexing by integers, slices, ``None``, an ellipsis and one list; a slice of the tokens is a view of own rows."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(model, WholeTensor) or not _are_plain(entries):
        raise NeedsWhole
    if not any(entry is Ellipsis for entry in entries):
        entries.append(Ellipsis)
    place = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    entries[place : place + 1] = [slice(None)] * (model.ndim - used)
    if used > model.ndim:
        raise NeedsWhole
    source = dim = 0
    stretch, cut_dim = (0, model.spread.length), model.along
    for position, entry in enumerate(entries):
        if entry is not None and source == model.along:
            if not isinstance(entry, slice):
                raise NeedsWhole
            start, stop, step = entry.indices(model.shape[source])
            if step != 1:
                raise NeedsWhole
            stretch, cut_dim, entries[position] = (start, max(start, stop)), dim, slice(None)
        source += entry is not None
        dim += entry is None or isinstance(entry, slice | list)
    local = model.local()[tuple(entries)]
    if stretch == (0, model.spread.length):
        return model.like(local, cut_dim)
    split, first, count = split_of(model).sliced(*stretch)
    return model.show(local.narrow(cut_dim, first, count), split, cut_dim)


def _are_plain(entries: list[Any]) -> bool:
    plain = [e is None or e is Ellipsis or isinstance(e, slice) or type(e) is int for e in entries]
    lists = [e for e in entries if isinstance(e, list)]
    if not lists:
        return all(plain)
    whole = all(type(number) is int for entry in lists for number in entry)  # the dim stays where it is, for one list
    return len(lists) == 1 and whole and sum(plain) == len(entries) - 1 and not any(type(e) is int for e in entries)


def _narrow(func: Any, model: WholeTensor, dim: int, start: Any, length: int) -> Any:
    if not isinstance(start, int):
        raise NeedsWhole
    start += model.shape[dim] if start < 0 else 0
    return _index(func, model, (slice(None),) * (dim % model.ndim) + (slice(start, start + length),))


def _permute(func: Any, model: WholeTensor, *dims: Any, **named: Any) -> WholeTensor:
    given = (named["dims"],) if "dims" in named else dims
    order = [d % model.ndim for d in (given[0] if len(given) == 1 and isinstance(given[0], Iterable) else given)]
    return model.like(model.local().permute(order), order.index(model.along))


def _movedim(func: Any, model: WholeTensor, source: int, destination: int) -> WholeTensor:
    order = [dim for dim in range(model.ndim) if dim != source % model.ndim]
    order.insert(destination % model.ndim, source % model.ndim)
    return _permute(func, model, order)


def along(func: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Functions of one dim, named ``dim`` or the first argument, that is not the tokens'."""
    dim = kwargs.get("dim", args[0] if args else None)
    dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, (tuple, list)) and dim else None
    if not isinstance(model, WholeTensor) or dims is None or not all(type(entry) is int for entry in dims):
        raise NeedsWhole
    chosen = {entry % model.ndim for entry in dims}
    if model.along in chosen or "out" in kwargs:
        raise NeedsWhole
    found = func(model.local(), *args, **kwargs)
    removed = sum(entry < model.along for entry in chosen)

    def shown(part: Any) -> Any:
        return model.like(part, model.along if part.ndim == model.ndim else model.along - removed)

    return shown(found) if isinstance(found, Tensor) else type(found)(tuple(map(shown, found)))


def _extreme(func: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """``max`` and ``min``: of one dim, or of the numbers of two tensors."""
    two = isinstance(args[0] if args else kwargs.get("other"), Tensor)
    return pointwise(func, model, *args, **kwargs) if two else along(func, model, *args, **kwargs)


def _second(func: Any, model: Any, size: Any, dim: int = 0, **kwargs: Any) -> Any:
    """Functions whose dim is their second argument: split, chunk, topk."""
    dim = int(kwargs.pop("axis", dim))
    if not isinstance(model, WholeTensor) or dim % model.ndim == model.along:
        raise NeedsWhole
    found = func(model.local(), size, dim=dim, **kwargs)
    return type(found)(tuple(model.like(part) for part in found))


def _topk(func: Any, model: Any, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(model, WholeTensor) or dim % model.ndim == model.along or "out" in kwargs:
        raise NeedsWhole
    found = func(model.local(), k, dim, *args, **kwargs)
    return type(found)(tuple(model.like(part) for part in found))


def _gather(func: Any, model: Any, dim: Any, index: Any, **kwargs: Any) -> Any:
    """Values at indices of another dim: those of this rank's tokens."""
    if not isinstance(model, WholeTensor) or not isinstance(index, Tensor) or kwargs or not isinstance(dim, int):
        raise NeedsWhole
    if dim % model.ndim == model.along or index.shape[model.along] != model.shape[model.along]:
        raise NeedsWhole
    if isinstance(index, WholeTensor):
        if index.spread != model.spread or index.along != model.along:
            raise NeedsWhole
        return model.like(func(model.local(), dim, index.local()))
    return model.like(func(model.local(), dim, model.spread.take_held(index, model.along, 0)))


def _strided(func: Any, model: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """A view by strides from the tensor's beginning: of the gathered one, whose strides are those that a split tensor
    says it has. An offset is one into memory that a split tensor may share with others, which is not to be had.
    """
    if storage_offset is None:
        raise NeedsWhole
    return MEMORY[T.as_strided](func, model, size, stride, storage_offset)


T = Tensor
_KEPT = (T.transpose, torch.transpose, T.swapaxes, *getters("mT"))
_ALONG = (
    *(T.unbind, torch.unbind, T.select, torch.select, T.argmax, torch.argmax, T.argmin, torch.argmin),
    *(T.amax, torch.amax, T.amin, torch.amin, T.cumsum, torch.cumsum),
    *(T.sort, torch.sort, T.argsort, torch.argsort, T.var, torch.var, T.std, torch.std, T.prod, torch.prod),
    *(T.any, torch.any, T.all, torch.all, T.index_select, torch.index_select),
)
RULES: dict[Any, Rule] = {
    **{func: rule for func, rule in VIEWS.items() if func in _KEPT},
    **dict.fromkeys(
        (T.view, T.reshape, T.flatten, torch.flatten, torch.reshape, T.unflatten, torch.unflatten), _reshape
    ),
    **dict.fromkeys((T.reshape_as, T.view_as), _reshape),
    **dict.fromkeys((T.squeeze, T.unsqueeze, torch.squeeze, torch.unsqueeze), _reshape),
    **dict.fromkeys((T.permute, torch.permute), _permute),
    **dict.fromkeys((T.movedim, torch.movedim), _movedim),
    T.expand: _expand,
    T.__getitem__: _index,
    **dict.fromkeys((T.narrow, torch.narrow), _narrow),
    **dict.fromkeys(_ALONG, along),
    **dict.fromkeys((T.max, torch.max, T.min, torch.min), _extreme),
    **dict.fromkeys((T.split, torch.split, T.chunk, torch.chunk), _second),
    **dict.fromkeys((T.topk, torch.topk), _topk),
    **dict.fromkeys((T.gather, torch.gather), _gather),
    **dict.fromkeys((T.as_strided, torch.as_strided), _strided),
}
