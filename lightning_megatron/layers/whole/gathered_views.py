"""Views of gathered copies of split tensors.

A view along the cut dim (``logits[..., 3]``) is one of a copy that was gathered. What is written into it
(``scores[:, 3] -= 1.0``) reaches the split tensor: each rank takes its part of the copy afterwards. What is written
into the split tensor reaches the view: the copy is gathered again before the view is used. Writes are counted by
memory, so that those by another view of it are seen. Where gradients are taken, both are refused.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.mesh.torch_functions import METADATA, by_place, is_in_place, name_of

_LOOKING_S = 6.0
_HARMLESS = {"requires_grad_", "detach_"}
_WRITES = WeakKeyDictionary[torch.UntypedStorage, int]()


def note_write(local: Tensor) -> None:
    """Count a write into a split tensor on all its ranks, including those that hold no part of what is written."""
    memory = local.untyped_storage()
    _WRITES[memory] = _WRITES.get(memory, 0) + 1


def writes_of(local: Tensor) -> int:
    """How many were counted, by any view of the part's memory."""
    return _WRITES.get(local.untyped_storage(), 0)


class ShownFirst:
    """Mixin: a tensor that stands for a whole one, and answers for all arguments before a split one does."""


class Split(Protocol):
    """Facts about a split tensor that a view of it needs."""

    @property
    def writes(self) -> int:
        """How often its memory was written to."""

    def full(self) -> Tensor:
        """The whole tensor."""

    def take_from(self, whole: Tensor) -> None:
        """Hold this rank's part of ``whole``."""


class GatheredCopy:
    """A gathered copy.

    Args:
        split: of which tensor.
        whole: the copy.
    """

    def __init__(self, split: Split, whole: Tensor) -> None:
        self._split, self._whole, self._writes = split, whole, split.writes

    @property
    def in_graph(self) -> bool:
        """Whether gradients are taken of it."""
        return self._whole.requires_grad and torch.is_grad_enabled()

    def renew(self, func: Callable[..., Any]) -> None:
        """Refresh a copy from the split tensor before ``func`` uses it."""
        if self._writes == self._split.writes:
            return
        if self.in_graph:
            raise RuntimeError(
                f"`{name_of(func)}` uses a view of a tensor that is split over ranks and was written to since the view "
                "was taken; take the view again after the write."
            )
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._whole.copy_(self._split.full())
        self._writes = self._split.writes

    def write(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Let ``func`` write into a view of the copy, and the split tensor follow."""
        with torch._C.DisableTorchFunctionSubclass():
            func(*args, **kwargs)
        self._split.take_from(self._whole)
        self._writes = self._split.writes

    def written(self, func: Callable[..., Any], view: Tensor, args: Any, kwargs: Any) -> Tensor | None:
        """The view after a write into it, of another copy, which has a gradient; the split tensor follows.

        Autograd allows no writes into what a custom function gave, as gathering does. This copy and its views are old
        from then on, and refused. ``None`` if the view cannot be found in another copy.

        Args:
            func: that writes.
            view: of this copy.
            args: of ``func``, after the view.
            kwargs: likewise.
        """
        with torch._C.DisableTorchFunctionSubclass():
            other = self._whole.clone()
            if other.stride() != self._whole.stride():
                return None
            place = view.storage_offset() - self._whole.storage_offset()
            found = other.as_strided(view.shape, view.stride(), place)
            func(found, *args, **kwargs)
        self._split.take_from(other)
        shown: Tensor = view_of(found, {other.untyped_storage()._cdata: GatheredCopy(self._split, other)})
        return shown


class GatheredView(torch.Tensor):
    """A view of a gathered copy."""

    _copy: GatheredCopy | None = None

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(types) > 1 and any(issubclass(kind, ShownFirst) for kind in types):
            return NotImplemented
        if func not in METADATA:
            for view in _views((args, kwargs)):
                if view._copy is not None:
                    view._copy.renew(func)
        func, args, kwargs = by_place(func, args, kwargs)
        written = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        in_place = is_in_place(func, kwargs) and name_of(func) not in _HARMLESS
        if (in_place and any(isinstance(v, cls) for v in written)) or list(_views(kwargs.get("out"))):
            return _written(func, args, kwargs)
        if any(hasattr(kind, "take_from") for kind in types):
            return NotImplemented  # a split tensor's rules know what to do with this one
        with torch._C.DisableTorchFunctionSubclass():
            memory = {value.untyped_storage()._cdata: value._copy for value in args if isinstance(value, cls)}
            return tree_map(lambda value: view_of(value, memory), func(*args, **kwargs))

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)


def _views(values: Any) -> Iterator[GatheredView]:
    return (value for value in tree_leaves(values) if isinstance(value, GatheredView))


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    out = kwargs.get("out")
    target = out if out is not None else args[0] if args else None
    copy = target._copy if isinstance(target, GatheredView) else None
    args, kwargs = tree_map(lambda v: v.full() if hasattr(type(v), "take_from") else v, (args, kwargs))
    left = isinstance(target, GatheredView) and not target.requires_grad  # the graph, as `.data` has
    if copy is not None and copy.in_graph and left:
        with torch.no_grad():
            copy.write(func, args, kwargs)
        return target
    if copy is not None and copy.in_graph and target is args[0]:
        found = copy.written(func, target, args[1:], kwargs)
        if found is not None:
            return found
    if copy is None or copy.in_graph:
        raise RuntimeError(
            f"`{name_of(func)}` writes into a view of a tensor that is split over ranks, of which the view is a "
            "gathered copy: the tensor would not change. Index it in the assignment itself "
            "(`logits[..., 3] = 0.0`), or `clone()` the view."
        )
    copy.write(func, args, kwargs)
    return target


def view_of(value: Any, copies: Mapping[int, GatheredCopy | None]) -> Any:
    """A tensor in the memory of a copy, as a view of it; any other as an ordinary tensor.

    Args:
        value: what a function gave.
        copies: by where their memory is; ``None`` where writing into a view is refused.
    """
    if not isinstance(value, Tensor) or hasattr(type(value), "take_from"):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        place = value.untyped_storage()._cdata if value.layout == torch.strided else 0
        if place not in copies:
            return value.as_subclass(Tensor) if type(value) is GatheredView else value
        view = value.as_subclass(GatheredView)
        view._copy = copies[place]
        return view


def is_kept(memory: torch.UntypedStorage) -> bool:
    """Whether somebody else holds on to gathered memory. A thread that looks at what this one waits for keeps frames in
    which the memory was made, with their variables, until it has looked: that is waited for.
    """
    until = time.monotonic() + _LOOKING_S
    while _users(memory) > 1:
        gc.collect()
        if _users(memory) > 1 and time.monotonic() > until:
            return True
        time.sleep(0.02)
    return False


def _users(memory: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(memory._cdata))
