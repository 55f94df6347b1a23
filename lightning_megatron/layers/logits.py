"""Logits that stay split over the vocabulary until someone needs them whole.

A vocabulary-parallel head returns a `VocabParallelLogits`: a tensor with the logical shape that holds only this
rank's classes. What leaves the class axis alone (views, slices of tokens, casts, elementwise arithmetic) gives
another one; ``torch.nn.functional.cross_entropy`` runs vocabulary-parallel; everything else (argmax, sampling,
metrics, indexing by class) first gathers the whole logits and then runs as usual, gradients included. Gathering is
a collective: code that does it must do it on every rank of the tensor group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_megatron.layers.loss import vocab_parallel_cross_entropy
from lightning_megatron.mesh.messages.collectives import gather_from_group


class VocabParallelLogits(torch.Tensor):
    """A tensor of logical shape [.., vocabulary, ..] of which this rank holds its part of the class axis."""

    _local: Tensor
    _group: dist.ProcessGroup
    _vocabulary: int
    _dim: int

    @staticmethod
    def wrap(local: Tensor, group: dist.ProcessGroup, vocabulary: int, dim: int = -1) -> VocabParallelLogits:
        """Logits from this rank's part.

        Args:
            local: [.., padded vocabulary / group, ..], classes along ``dim``.
            group: the tensor group.
            vocabulary: number of real classes.
            dim: the class axis.
        """
        dim %= local.ndim
        shape = (*local.shape[:dim], vocabulary, *local.shape[dim + 1 :])
        logits: VocabParallelLogits = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            VocabParallelLogits, shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        logits._local, logits._group, logits._vocabulary, logits._dim = local, group, vocabulary, dim
        return logits

    def like(self, local: Tensor, dim: int | None = None) -> VocabParallelLogits:
        """Other local values with the same vocabulary."""
        return VocabParallelLogits.wrap(local, self._group, self._vocabulary, self._dim if dim is None else dim)

    def local(self) -> Tensor:
        """This rank's classes, padding included."""
        return self._local

    def full(self) -> Tensor:
        """The whole logits on every rank, as an ordinary tensor; a collective over the tensor group."""
        whole = gather_from_group(self._local, self._dim, self._group)
        return whole.narrow(self._dim, 0, self._vocabulary)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"VocabParallelLogits(shape={tuple(self.shape)}, dtype={self.dtype}, local={tuple(self._local.shape)})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.full().detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full().detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        handler = _SHARDED.get(func)
        if handler is not None and isinstance(first, (cls, list, tuple)):
            with contextlib.suppress(_NeedsWhole):
                return handler(func, *args, **kwargs)
        if _is_in_place(func) and isinstance(first, cls):
            return _in_place(func, *args, **kwargs)
        args, kwargs = tree_map(_whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(_whole, (args, kwargs or {}))
        return func(*args, **kwargs)


class _NeedsWhole(Exception):
    """The operation touches the class axis."""


def _whole(value: Any) -> Any:
    return value.full() if isinstance(value, VocabParallelLogits) else value


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED


def _in_place(func: Any, logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> VocabParallelLogits:
    """Run an in-place operation on the whole logits and keep this rank's part of the result."""
    args, kwargs = tree_map(_whole, (args, kwargs))
    whole = logits.full().clone()
    func(whole, *args, **kwargs)
    length = logits._local.shape[logits._dim]
    start = logits._group.rank() * length
    held = max(0, min(length, logits._vocabulary - start))
    part = whole.narrow(logits._dim, min(start, logits._vocabulary), held).movedim(logits._dim, -1)
    logits._local = F.pad(part, (0, length - held)).movedim(-1, logits._dim)
    return logits


def _cross_entropy(func: Any, input: VocabParallelLogits, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    if options.pop("size_average", None) is not None or options.pop("reduce", None) is not None:
        raise _NeedsWhole
    expected = (0 if input.ndim == 1 else 1) if input.ndim != 2 else 1
    if target.is_floating_point() or input._dim != expected or isinstance(target, VocabParallelLogits):
        raise _NeedsWhole
    local = input._local.movedim(input._dim, -1)
    return vocab_parallel_cross_entropy(local, target, group=input._group, vocabulary=input._vocabulary, **options)


def _of_local(func: Any, logits: VocabParallelLogits, *args: Any) -> Any:
    """Questions about the graph, which the local part answers."""
    return func(logits._local, *args)


def _format(func: Any, logits: VocabParallelLogits, spec: str) -> str:
    """Printing must not communicate: it is often done on one rank only."""
    return repr(logits)


def _elementwise(func: Any, logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> VocabParallelLogits:
    """Operations that act on every element alike; a further tensor (a bias, a mask) is cut to this rank's classes."""
    args, kwargs = tree_map(lambda value: _own_classes(logits, value), (args, kwargs))
    local = func(logits._local, *args, **kwargs)
    if local.shape != logits._local.shape:
        raise _NeedsWhole
    return logits.like(local)


def _own_classes(logits: VocabParallelLogits, value: Any) -> Any:
    """The part of an operand that meets this rank's classes; one with a gradient of its own needs whole logits."""
    if isinstance(value, VocabParallelLogits):
        if value.shape != logits.shape or value._dim != logits._dim or value._group != logits._group:
            raise _NeedsWhole
        return value._local
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    axis = value.ndim - (logits.ndim - logits._dim)
    if value.requires_grad or value.ndim > logits.ndim:
        raise _NeedsWhole
    if axis < 0 or value.shape[axis] == 1:
        return value
    length = logits._local.shape[logits._dim]
    start = min(logits._group.rank() * length, logits._vocabulary)
    part = value.narrow(axis, start, min(length, logits._vocabulary - start)).movedim(axis, -1)
    return F.pad(part, (0, length - part.shape[-1])).movedim(-1, axis)


def _in_place_elementwise(func: Any, logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> VocabParallelLogits:
    """The same, written into this rank's classes."""
    args, kwargs = tree_map(lambda value: _own_classes(logits, value), (args, kwargs))
    func(logits._local, *args, **kwargs)
    return logits


def _reshape(func: Any, logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> VocabParallelLogits:
    """Views that keep the classes as an axis of their own."""
    if any(isinstance(value, torch.dtype) for value in args):
        raise _NeedsWhole
    args = tuple(torch.empty(v.shape, device="meta") if isinstance(v, Tensor) else v for v in args)
    old, shape = logits.shape, func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    before, after = old[: logits._dim].numel(), old[logits._dim + 1 :].numel()
    for dim, size in enumerate(shape):
        kept = size == logits._vocabulary and shape[:dim].numel() == before
        if kept and shape[dim + 1 :].numel() == after:
            length = logits._local.shape[logits._dim]
            return logits.like(logits._local.reshape(*shape[:dim], length, *shape[dim + 1 :]), dim)
    raise _NeedsWhole


def _along(position: int, func: Any, logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    """Functions of one axis, at ``position`` of the arguments or the first one; the class axis needs whole logits."""
    dim = kwargs.get("dim", args[position] if len(args) > position else 0)
    if not isinstance(dim, int) or dim % logits.ndim == logits._dim:
        raise _NeedsWhole
    found = func(logits._local, *args, **kwargs)
    parts = found if isinstance(found, (tuple, list)) else (found,)
    removed = parts[0].ndim < logits.ndim and dim % logits.ndim < logits._dim
    split = tuple(logits.like(part, logits._dim - removed) for part in parts)
    return split if isinstance(found, (tuple, list)) else split[0]


def _join(func: Any, parts: Any, *args: Any, **kwargs: Any) -> VocabParallelLogits:
    """Concatenation of logits that are split alike."""
    dim = kwargs.get("dim", args[0] if args else 0)
    first = parts[0]
    stacked = func is torch.stack
    if not isinstance(first, VocabParallelLogits) or not isinstance(dim, int):
        raise _NeedsWhole
    dim %= first.ndim + stacked
    if not stacked and dim == first._dim:
        raise _NeedsWhole
    locals_ = [_alike(first, part) for part in parts]
    return first.like(func(locals_, dim), first._dim + (stacked and dim <= first._dim))


def _alike(first: VocabParallelLogits, other: Any) -> Tensor:
    """The local part of logits that are split in the same way."""
    alike = isinstance(other, VocabParallelLogits) and other._group == first._group
    if not alike or other._dim != first._dim or other.ndim != first.ndim or other._vocabulary != first._vocabulary:
        raise _NeedsWhole
    return cast(Tensor, other._local)


def _transpose(func: Any, logits: VocabParallelLogits, dim0: int, dim1: int) -> VocabParallelLogits:
    first, second = dim0 % logits.ndim, dim1 % logits.ndim
    return logits.like(logits._local.transpose(first, second), {first: second, second: first}.get(logits._dim))


def _matrix_transpose(func: Any, logits: VocabParallelLogits, *owner: Any) -> VocabParallelLogits:
    if logits.ndim < 2:
        raise _NeedsWhole
    return _transpose(func, logits, -2, -1)


def _permute(func: Any, logits: VocabParallelLogits, *dims: Any) -> VocabParallelLogits:
    order = [d % logits.ndim for d in (dims[0] if len(dims) == 1 and isinstance(dims[0], Iterable) else dims)]
    return logits.like(logits._local.permute(order), order.index(logits._dim))


def _index(func: Any, logits: VocabParallelLogits, index: Any) -> VocabParallelLogits:
    """Indexing of tokens; the class axis must be last and untouched (or taken whole by a bare slice)."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if logits._dim != logits.ndim - 1 or any(entry is None or isinstance(entry, bool) for entry in entries):
        raise _NeedsWhole
    if any(entry is Ellipsis for entry in entries):
        place = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
        missing = logits.ndim - sum(_axes(entry) for entry in entries if entry is not Ellipsis)
        entries[place : place + 1] = [slice(None)] * missing
    used = sum(_axes(entry) for entry in entries)
    if used == logits.ndim and isinstance(entries[-1], slice) and entries[-1] == slice(None):
        entries.pop()
    elif used >= logits.ndim:
        raise _NeedsWhole
    local = logits._local[tuple(entries)]
    return logits.like(local, local.ndim - 1)


def _axes(entry: Any) -> int:
    """How many axes of the tensor an index entry uses."""
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.ndim
    return 1


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names]


T = Tensor
_AUGMENTED = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__imod__"}
_METADATA = {
    *_getters("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_meta", "is_quantized"),
    *_getters("is_nested", "is_mkldnn", "_version", "output_nr"),
    *(T.size, T.dim, T.numel, T.nelement, T.ndimension, T.is_floating_point, T.is_complex, T.element_size, T.__len__),
    *(torch.is_floating_point, torch.is_complex, torch.numel, T.get_device, T.__hash__, T.stride, T.is_contiguous),
}
_CASTS = (
    *(T.float, T.double, T.half, T.bfloat16, T.to, T.type_as, T.contiguous, T.clone, T.detach, T.cpu, T.cuda),
    *(torch.clone, torch.detach),
)
_ARITHMETIC = (
    *(T.mul, T.div, T.add, T.sub, T.true_divide, T.neg, T.tanh, T.clamp),
    *(T.__mul__, T.__rmul__, T.__truediv__, T.__add__, T.__radd__, T.__sub__, T.__neg__),
    *(torch.mul, torch.div, torch.add, torch.sub, torch.tanh, torch.clamp),
)
_IN_PLACE = (
    *(T.mul_, T.div_, T.add_, T.sub_, T.neg_, T.tanh_, T.clamp_),
    *(T.__imul__, T.__itruediv__, T.__iadd__, T.__isub__),
)
_ALONG_FIRST = (T.narrow, torch.narrow, T.select, torch.select, T.unbind, torch.unbind, T.index_select)
_ALONG_SECOND = (T.chunk, torch.chunk, T.split, torch.split)
_SHARDED: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    T.__format__: _format,
    **dict.fromkeys(_getters("requires_grad", "grad_fn", "is_leaf"), _of_local),
    **dict.fromkeys((*_CASTS, *_ARITHMETIC), _elementwise),
    **dict.fromkeys(_IN_PLACE, _in_place_elementwise),
    **dict.fromkeys(_ALONG_FIRST, partial(_along, 0)),
    **dict.fromkeys(_ALONG_SECOND, partial(_along, 1)),
    **dict.fromkeys((torch.cat, torch.concat, torch.stack), _join),
    **dict.fromkeys((T.view, T.reshape, T.flatten, torch.flatten, torch.reshape, T.unflatten), _reshape),
    **dict.fromkeys((T.reshape_as, T.view_as), _reshape),
    **dict.fromkeys(_getters("mT"), _matrix_transpose),
    **dict.fromkeys((T.squeeze, T.unsqueeze, torch.squeeze, torch.unsqueeze), _reshape),
    **dict.fromkeys((T.transpose, torch.transpose, T.swapaxes), _transpose),
    **dict.fromkeys((T.permute, torch.permute), _permute),
    T.__getitem__: _index,
}
