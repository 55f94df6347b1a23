"""Rules for views, joins and indexing that leave the cut dim alone: they give another split tensor."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.layers.whole.base import NeedsWhole, Rule, WholeTensor
from lightning_megatron.mesh.torch_functions import getters


def _reshape(func: Any, model: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Views that keep the cut dim as a dim of its own; those of other tensors take the global shape."""
    if not isinstance(model, WholeTensor):
        shapes = [torch.empty(v.shape, device="meta") if isinstance(v, WholeTensor) else v for v in args]
        return func(model, *shapes, **kwargs)  # type: ignore[no-any-return]
    if any(isinstance(value, torch.dtype) for value in args):
        raise NeedsWhole
    args = tuple(torch.empty(v.shape, device="meta") if isinstance(v, Tensor) else v for v in args)
    old, shape = model.shape, func(torch.empty(model.shape, device="meta"), *args, **kwargs).shape
    before, after = old[: model.along].numel(), old[model.along + 1 :].numel()
    for dim, size in enumerate(shape):
        kept = size == model.spread.length and shape[:dim].numel() == before
        if kept and shape[dim + 1 :].numel() == after:
            local = model.local()
            return model.like(local.reshape(*shape[:dim], local.shape[model.along], *shape[dim + 1 :]), dim)
    raise NeedsWhole


def _along(position: int, func: Any, model: WholeTensor, *args: Any, **kwargs: Any) -> Any:
    """Functions of one dim, at ``position`` of the arguments or the first one; the cut one needs the whole tensor."""
    dim = kwargs.get("dim", args[position] if len(args) > position else 0)
    if not isinstance(dim, int) or dim % model.ndim == model.along:
        raise NeedsWhole
    found = func(model.local(), *args, **kwargs)
    parts = found if isinstance(found, (tuple, list)) else (found,)
    removed = parts[0].ndim < model.ndim and dim % model.ndim < model.along
    split = tuple(model.like(part, model.along - removed) for part in parts)
    return split if isinstance(found, (tuple, list)) else split[0]


def _join(func: Any, parts: Any, *args: Any, **kwargs: Any) -> WholeTensor:
    """Concatenation of tensors that are cut alike."""
    dim = kwargs.get("dim", args[0] if args else 0)
    first = parts[0]
    stacked = func is torch.stack
    if not isinstance(first, WholeTensor) or not isinstance(dim, int):
        raise NeedsWhole
    dim %= first.ndim + stacked
    if not stacked and dim == first.along:
        raise NeedsWhole
    locals_ = [_local_like(first, part) for part in parts]
    return first.like(func(locals_, dim), first.along + (stacked and dim <= first.along))


def _local_like(first: WholeTensor, other: Any) -> Tensor:
    """The local part of a tensor that is cut like the first one, whatever its size along other dims."""
    if not isinstance(other, WholeTensor) or other.spread != first.spread:
        raise NeedsWhole
    if other.along != first.along or other.ndim != first.ndim:
        raise NeedsWhole
    return other.local()


def _transpose(func: Any, model: WholeTensor, dim0: int, dim1: int) -> WholeTensor:
    first, second = dim0 % model.ndim, dim1 % model.ndim
    moved = {first: second, second: first}.get(model.along)
    return model.like(model.local().transpose(first, second), moved)


def _matrix_transpose(func: Any, model: WholeTensor, *owner: Any) -> WholeTensor:
    if model.ndim < 2:
        raise NeedsWhole
    return _transpose(func, model, -2, -1)


def _permute(func: Any, model: WholeTensor, *dims: Any) -> WholeTensor:
    order = [d % model.ndim for d in (dims[0] if len(dims) == 1 and isinstance(dims[0], Iterable) else dims)]
    return model.like(model.local().permute(order), order.index(model.along))


def _index(func: Any, model: Any, index: Any) -> WholeTensor:
    """Indexing of other dims; the cut dim must be last and untouched (or taken whole by a bare slice)."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(model, WholeTensor) or model.along != model.ndim - 1:
        raise NeedsWhole
    if any(entry is None or isinstance(entry, bool | WholeTensor) for entry in entries):
        raise NeedsWhole
    if any(entry is Ellipsis for entry in entries):
        place = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
        missing = model.ndim - sum(_axes(entry) for entry in entries if entry is not Ellipsis)
        entries[place : place + 1] = [slice(None)] * missing
    used = sum(_axes(entry) for entry in entries)
    if used == model.ndim and isinstance(entries[-1], slice) and entries[-1] == slice(None):
        entries.pop()
    elif used >= model.ndim:
        raise NeedsWhole
    local = model.local()[tuple(entries)]
    return model.like(local, local.ndim - 1)


def _axes(entry: Any) -> int:
    """How many dims of the tensor an index entry uses."""
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.ndim
    return 1


T = Tensor
_ALONG_FIRST = (T.narrow, torch.narrow, T.select, torch.select, T.unbind, torch.unbind, T.index_select)
_ALONG_SECOND = (T.chunk, torch.chunk, T.split, torch.split)
RULES: dict[Any, Rule] = {
    **dict.fromkeys(_ALONG_FIRST, partial(_along, 0)),
    **dict.fromkeys(_ALONG_SECOND, partial(_along, 1)),
    **dict.fromkeys((torch.cat, torch.concat, torch.stack), _join),
    **dict.fromkeys((T.view, T.reshape, T.flatten, torch.flatten, torch.reshape, T.unflatten), _reshape),
    **dict.fromkeys((T.reshape_as, T.view_as), _reshape),
    **dict.fromkeys((T.squeeze, T.unsqueeze, torch.squeeze, torch.unsqueeze), _reshape),
    **dict.fromkeys(getters("mT"), _matrix_transpose),
    **dict.fromkeys((T.transpose, torch.transpose, T.swapaxes), _transpose),
    **dict.fromkeys((T.permute, torch.permute), _permute),
    T.__getitem__: _index,
}
