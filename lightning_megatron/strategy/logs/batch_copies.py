"""A copy of a batch for one run of the step, which knows what became of it.

Containers are copied, and so are the tensors that the caller wants to have memory of their own. What shares memory in
the batch shares it in the copy::

    batch    {"tokens": t, "labels": t[:, 1:]}      the step: batch["labels"].add_(1); batch["seen"] = 4
    copy     {"tokens": u, "labels": u[:, 1:]}      written() -> [(t[:, 1:], u[:, 1:])]
                                                    rebound() -> [((), {"seen": 4}, [])]

Followed are dicts, lists, tuples, dataclasses, Hugging Face's ``BatchEncoding`` and plain objects; others are given as
they are.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Hashable, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.batches import map_tensors

_SCALARS = (str, bytes, bool, int, float, complex, type(None))
_COPIES_ITSELF = ("__copy__", "__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")

_USUAL_WRITES = {
    name: [getattr(kind, name, None) for kind in (dict, list, OrderedDict, defaultdict)]
    for name in ("__setitem__", "clear", "update", "extend")
}

Path = tuple[Any, ...]
"""Keys, indices and names of attributes that lead from a batch to a container in it."""


class Given(NamedTuple):
    """A tensor of a batch, and the one that a run has in its place.

    Attributes:
        tensor: of the batch.
        given: what the run has.
        is_copy: whether that has memory of its own.
        version: of ``given`` at first; ``None`` in inference mode, where writes are not counted.
    """

    tensor: Tensor
    given: Tensor
    is_copy: bool
    version: int | None


class CopiedContainer(NamedTuple):
    """A container of a batch, its copy, and what that held at first."""

    path: Path
    original: Any
    copy: Any
    held: dict[Hashable, Any]


class Rebound(NamedTuple):
    """Entries that a run has bound anew in a container: values by key, and the keys that it took away."""

    container: CopiedContainer
    values: dict[Hashable, Any]
    removed: list[Hashable]


class BatchCopy:
    """A batch for one run.

    Args:
        batch: the user's, or a micro-batch.
        own: whether the copy of a tensor has memory of its own.
        shared: whether some of its tensors may share memory.

    Attributes:
        value: the copy.
        tensors: those that the run was given.
        containers: those that were copied.
    """

    def __init__(self, batch: Any, own: Callable[[Tensor], bool], *, shared: bool) -> None:
        self.tensors: list[Given] = []
        self.containers: list[CopiedContainer] = []
        self._own, self._memo = own, dict[int, Any]()
        self._storages = _shared_storages(batch) if shared else {}
        self._originals: dict[int, Any] | None = None
        self.value = self._copied(batch, ())

    def written(self) -> list[Given]:
        """The tensors that the run has written into."""
        return [
            pair
            for pair in self.tensors
            if (
                pair.given._version != pair.version
                if pair.version is not None
                else pair.is_copy and not torch.equal(pair.given, pair.tensor)
            )
        ]

    def rebound(self) -> list[Rebound]:
        """The containers in which the run has bound something anew; values of the batch stand for their copies."""
        found = []
        for each in self.containers:
            now = contents(each.copy)
            if now.keys() == each.held.keys() and all(map(is_, now.values(), each.held.values())):
                continue  # in the same order, as nearly always
            values = {key: value for key, value in now.items() if key not in each.held or value is not each.held[key]}
            removed = [key for key in each.held if key not in now]
            if values or removed:
                found.append(Rebound(each, {k: self._original(value) for k, value in values.items()}, removed))
        return found

    def _original(self, value: Any) -> Any:
        if self._originals is None:
            self._originals = {id(each.given): each.tensor for each in self.tensors}
            self._originals |= {id(each.copy): each.original for each in self.containers}
        return self._originals.get(id(value), value)

    def _copied(self, value: Any, path: Path) -> Any:
        if value.__class__ is Tensor or isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, _SCALARS):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, tuple):
            items = [self._copied(item, (*path, index)) for index, item in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # type: ignore[call-arg]
        empty = _empty_like(value, whole=not path)
        if empty is None:
            return map_tensors(value, self._tensor)
        self._memo[id(value)] = empty
        held = {key: self._copied(item, (*path, key)) for key, item in contents(value).items()}
        fill(empty, held)
        self.containers.append(CopiedContainer(path, value, empty, held))
        return empty

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad or id(tensor) in self._memo:
            return self._memo.get(id(tensor), tensor)
        own = self._own(tensor)
        if not own:
            given = tensor.data  # whose writes do not count for the other rows'
        elif self._storages and (storage := self._storages.get(_storage(tensor))) is not None:
            given = _view_like(tensor, storage)
        else:
            given = tensor.clone()
        self._memo[id(tensor)] = given
        self.tensors.append(Given(tensor, given, own, None if given.is_inference() else given._version))
        return given


def contents(container: Any) -> dict[Hashable, Any]:
    """Contents of a container, by key, index or name of attribute."""
    if isinstance(container, dict):
        return container
    return dict(enumerate(container)) if isinstance(container, list) else vars(container)


def fill(container: Any, held: Mapping[Hashable, Any]) -> None:
    """Let a container hold something else than before."""
    if isinstance(container, list):
        container[:] = held.values()
    elif isinstance(container, dict):
        container.clear()
        container.update(held)
    else:
        vars(container).clear()
        vars(container).update(held)


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in the order of its keys; one that stands there twice is listed once."""
    found: dict[int, Tensor] = {}
    map_tensors(vars(batch) if _is_plain(batch) else batch, lambda tensor: found.setdefault(id(tensor), tensor))
    return list(found.values())


def _empty_like(value: Any, *, whole: bool) -> Any:
    """A container of the same kind to be filled; ``None`` for what is not followed."""
    if isinstance(value, (dict, list)):
        return _emptied(value)
    if isinstance(value, UserDict) or (hasattr(value, "__dict__") and dataclasses.is_dataclass(type(value))):
        return None if _has_slots(type(value)) else object.__new__(type(value))
    return object.__new__(type(value)) if whole and _is_plain(value) else None


def _emptied(value: Any) -> Any:
    """A dict or list of the same class; ``None`` for a class that does not let its entries be set as those do."""
    kind = type(value)
    if kind is dict or kind is list:
        return kind()
    if any(getattr(kind, name, None) not in usual for name, usual in _USUAL_WRITES.items()):
        return None
    try:
        found = value.copy() if isinstance(value, defaultdict) else kind()
    except TypeError:
        return None
    own = getattr(value, "__dict__", value)
    if own is not value:  # else its entries are its attributes
        vars(found).update(own)
    return found


def _is_plain(value: Any) -> bool:
    """Whether an object is its attributes and nothing else."""
    kind = type(value)
    if (
        isinstance(value, (dict, list, tuple, Tensor, type, nn.Module))
        or callable(value)
        or not hasattr(value, "__dict__")
    ):
        return False
    alike = all(getattr(kind, name, None) is getattr(object, name, None) for name in _COPIES_ITSELF)
    made = kind.__dict__.get("__new__")
    return alike and made is None and not _has_slots(kind)


def _has_slots(kind: type) -> bool:
    return any(base.__dict__.get("__slots__") for base in kind.__mro__[:-1])


def _shared_storages(batch: Any) -> dict[int, torch.UntypedStorage]:
    """Copies of the memory that several of a batch's tensors share, by its address."""
    tensors = tensors_of(batch)
    found = {_storage(tensor): tensor for tensor in tensors}
    counts = Counter(map(_storage, tensors))
    return {place: found[place].untyped_storage().clone() for place, count in counts.items() if place and count > 1}


def whole_copy(batch: Any) -> Any:
    """A copy of a batch all of whose tensors have memory of their own."""
    return BatchCopy(batch, lambda _: True, shared=shares_memory(batch)).value


def shares_memory(batch: Any) -> bool:
    """Whether several of a batch's tensors lie in one piece of memory."""
    places = [place for tensor in tensors_of(batch) if (place := _storage(tensor))]
    return len(set(places)) < len(places)


def _storage(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 for tensors without any."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _view_like(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload, no-any-return]


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in one piece of memory."""
    return one is other or 0 < _storage(one) == _storage(other)
