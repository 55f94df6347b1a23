"""Putting back what user code has written, where it must not stay.

One process runs the user's code once per batch. Here it runs more often: on each stage that needs what it leaves
behind, on copies of a batch that try something, abstractly for shapes, again for a backward. What the code may write
to is noted before such a run, and compared or put back after it. This file is the only one that does so in place::

    Contents    one tensor, list or generator           all that is below is made of these
    Kept        a table, put back as a whole            of a trial or an abstract run nothing stays
    Snapshot    containers; tells single Changes        what belongs to one micro-batch goes, the rest stays

Hooks of modules: ``strategy/hooks/kept_hooks.py``. Trials of parts that fit into memory twice need none of it:
``parallelize/reading/replay.py`` runs a copy.

Of single writes: a step that adds up its layers' auxiliary losses resets them, before the layers or after them. Stages
that end before that line have run their layers on the next micro-batch long before. In one process nothing can hold on
to a graph from one step to the next, so neither may a stage: what hangs on the micro-batch's graph is put back when its
run ends, and so is what was added to lists. Numbers stay: a layer may count.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Container as AnyContainer
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.mesh.autograd import put_back, version_of
from lightning_megatron.mesh.draws.given_again import State, set_state, state_of
from lightning_megatron.mesh.parts.packages import is_library, module_of
from lightning_megatron.pipeline.elsewhere.containers import MISSING, Container
from lightning_megatron.pipeline.elsewhere.reachable import LONGEST, Reach

LISTS = (list, deque, set)
"""What is written to entry by entry."""

ARRAY = 1 << 26
"""Bytes of the largest array that is copied; larger ones are data."""

SUM = 64
"""Elements of the largest tensor that is taken for something that layers add to."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ONLY_PLAIN = frozenset(_PLAIN)
Entries = dict[Any, Any] | list[Any]


@dataclass(frozen=True)
class Contents:
    """Contents of an object that code writes to in place: a tensor, a list, a set, the state of a generator.

    Attributes:
        value: the object.
        copy: of it, as it was; ``None`` of a tensor that is only watched.
        version: of a tensor, then.
    """

    value: Any
    copy: Any
    version: int = 0

    @classmethod
    def of(cls, value: Any) -> Contents | None:
        """Those of a value; ``None`` of one that is not written to in place."""
        if type(value) is Tensor and not value.is_meta:
            return cls.of_tensor(value)
        if isinstance(value, LISTS) or (is_array(value) and value.ndim and value.nbytes <= ARRAY):
            return cls(value, value.copy())
        state = state_of(value)
        return None if state is None else cls(value, state)

    @classmethod
    def of_tensor(cls, tensor: Tensor, *, copies: bool = True) -> Contents:
        """Those of a tensor, of whatever class.

        Args:
            tensor: the tensor.
            copies: whether its numbers are kept, and not just its version, of which torch counts one for each write.
        """
        return cls(tensor, tensor.detach().clone() if copies else None, version_of(tensor))

    def is_touched(self, now: Tensor) -> bool:
        """Whether the tensor has been replaced by another, ``now``, or written to."""
        return now is not self.value or version_of(now) != self.version

    def is_changed(self, now: Tensor, *, uncounted: bool = False) -> bool:
        """Whether ``now``, which is in the tensor's place, has other numbers; of a tensor that is only watched, whether
        it was written to.

        Args:
            now: a tensor.
            uncounted: compare the numbers even where no write was counted: norms write their statistics uncounted.
        """
        touched, copy = self.is_touched(now), self.copy
        if copy is None or copy.shape != now.shape or copy.dtype != now.dtype:
            return touched
        return (touched or uncounted) and not torch.equal(copy, now)

    def put_back(self) -> None:
        """Leave the object as it was; one that has not changed, or of which there is no copy, is not written to."""
        value, copy = self.value, self.copy
        if isinstance(value, Tensor):
            if copy is not None and not is_equal(value, copy):
                put_back(value, copy, self.version)
        elif isinstance(copy, State):
            if state_of(value) != copy:
                set_state(value, copy)
        elif is_array(value):
            written_into(value, copy)
        else:
            refill(value, copy)

    def rewind(self) -> None:
        """Leave a tensor as if nobody had written to it: a graph that holds it may run its backward."""
        if self.copy is not None and self.copy.shape == self.value.shape:
            with torch.no_grad():
                self.value.copy_(self.copy)
            torch._C._autograd._unsafe_set_version_counter((self.value,), (self.version,))


def refill(value: Any, entries: Any) -> None:
    """Let a list, deque or set hold ``entries`` and nothing else."""
    if isinstance(value, set):
        if value != entries:
            value.clear()
            value.update(entries)
    elif len(value) != len(entries) or not all(map(is_, value, entries)):
        value.clear()
        value.extend(entries)


def is_array(value: Any) -> bool:
    """Whether a value is one of NumPy's arrays, or one of its numbers."""
    kind: type = type(value)
    return is_kind_of_array(kind)


@functools.cache
def is_kind_of_array(kind: type) -> bool:
    """Whether a class is that of NumPy's arrays, or one of its numbers."""
    return module_of(kind) == "numpy" and hasattr(kind, "dtype")


def written_into(original: Any, value: Any) -> Any:
    """``value``, or an array that now holds its numbers, where that has its shape and may be written to."""
    if value is original or not (is_array(original) and is_array(value) and value.ndim):
        return value
    if original.shape != value.shape or original.dtype != value.dtype or not original.flags.writeable:
        return value
    if not is_equal(original, value):
        original[...] = value
    return original


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; tensors, where shape, dtype and device are as well; lists, entry by entry."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return same and bool(torch.equal(one.detach(), other.detach()))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    if isinstance(one, (list, tuple, deque)) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(entry, other[key]) for key, entry in one.items())
    if getattr(one, "shape", None) != getattr(other, "shape", None):
        return False  # arrays, which NumPy does not compare then
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


class Kept:
    """Entries of a table as they were: attributes, buffers, entries of a dictionary.

    Args:
        table: the table.
        keys: of the entries; of all by default.
        inside: whether what is inside of them counts, where it is written to in place.

    Attributes:
        table: the table.
        values: by key, the value, or :data:`~.containers.MISSING`, and what was inside of it.
    """

    def __init__(
        self, table: MutableMapping[Any, Any], keys: Iterable[Any] | None = None, *, inside: bool = True
    ) -> None:
        self.table = table
        self.values: dict[Any, tuple[Any, Contents | None]] = {}
        for key in table if keys is None else keys:
            value = table.get(key, MISSING)
            self.values[key] = value, Contents.of(value) if inside and type(value) not in _ONLY_PLAIN else None

    def earlier(self, key: Any) -> Any:
        """A value as it was; :data:`~.containers.MISSING` where there was none."""
        value, inside = self.values.get(key, (MISSING, None))
        return value if inside is None else inside.copy

    def put_back(self, spared: AnyContainer[Any] | None = None) -> None:
        """Leave the entries as they were.

        Args:
            spared: keys that stay although they were not kept; by default all do.
        """
        new = () if spared is None else [key for key in self.table if key not in self.values and key not in spared]
        for key in new:
            del self.table[key]
        for key, (value, inside) in self.values.items():
            if value is MISSING:
                self.table.pop(key, None)
            elif self.table.get(key, MISSING) is not value:
                self.table[key] = value
            if inside is not None:
                inside.put_back()


@contextmanager
def unchanged(module: nn.Module, arguments: tuple[Any, ...] = ()) -> Iterator[None]:
    """Around a run of a module that leaves nothing behind: attributes and tables of the module and of all that is in
    it, its buffers, and what else its code and its hooks can write to: lists, dictionaries, globals, and such among the
    arguments of a call.

    Args:
        module: the module.
        arguments: of the call.
    """
    attributes = [child.__dict__ for child in module.modules()]
    tables = [value for table in attributes for value in table.values() if type(value) in (dict, OrderedDict)]
    empty = [table for table in tables if not table]  # most, of hooks
    kept = [Kept(table, inside=False) for table in (*attributes, *(table for table in tables if table))]
    orders = [list(each.table) for each in kept]
    buffers = [Contents.of_tensor(buffer) for buffer in module.buffers() if not buffer.is_meta]
    reached = Reach(module, module, frozenset(), longest=LONGEST).containers(arguments)
    contents = [(container, container.contents()) for container in reached]
    try:
        yield
    finally:
        for each, order in zip(kept, orders, strict=True):
            each.put_back(())
            if list(each.table) != order:  # modules run and parameters are listed in it
                entries = {key: each.table.pop(key) for key in order}
                each.table.update(entries)
        for table in empty:
            table.clear()
        for container, found in contents:
            container.restore(found)
        for buffer in buffers:  # a counter of no dimensions is advanced even in an abstract run
            buffer.put_back()


@dataclass(frozen=True)
class Change:
    """A single write; see :class:`.effects.Effect`, by which other stages are told of it.

    Attributes:
        container: where.
        kind: of the effect.
        key: of the entry; ``None`` for lists.
        old: what was there; for lists that grew nothing.
        new: what is there since, or the entries that were added.
    """

    container: Container
    kind: str
    key: Any
    old: Any
    new: Any

    @property
    def is_of_micro_batch(self) -> bool:
        """Whether it must not be there any more when the next micro-batch comes."""
        return self.kind != "set" or has_graph(self.new)

    @property
    def is_kept(self) -> bool:
        """Whether an entry is still the one that was set."""
        return self.container.read(self.key) is self.new

    def take_back(self) -> None:
        """Restore the earlier value, unless other code has written to the entry since."""
        if self.kind == "set":
            if self.is_kept:
                self.container.put(self.key, self.old)
            return
        entries = self.container.value
        if self.kind == "fill" and len(entries) == len(self.new):
            self.container.change("fill", None, self.old)
        elif self.kind == "append":
            for entry in self.new:
                place = next((i for i in reversed(range(len(entries))) if entries[i] is entry), None)
                if place is not None:
                    del entries[place]


class Snapshot:
    """The containers that a call can write to, as they were before it.

    Attributes:
        changes: what has changed since; filled by :meth:`compare`.
    """

    def __init__(self, containers: Sequence[Container]) -> None:
        contents = [(container, container.contents()) for container in containers]
        self._before = [(container, found, _tensors(container, found)) for container, found in contents]
        self.changes: list[Change] = []

    def compare(self) -> list[Change]:
        """Every change since, in :attr:`changes` as well."""
        self.changes = [change for before in self._before for change in _changes(*before)]
        return self.changes

    def take_back(self) -> None:
        """Undo the changes that belong to this micro-batch alone."""
        for change in reversed(self.changes):
            if change.is_of_micro_batch:
                change.take_back()


def _changes(container: Container, before: Entries, tensors: dict[Any, Contents]) -> Iterator[Change]:
    """Each change of a container."""
    now = container.contents()
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(key, before.get(key, MISSING), value) for key, value in now.items()]
    elif len(before) > len(now) or not all(old is new for old, new in zip(before, now, strict=False)):
        if len(now) != len(before):
            yield Change(container, "fill", None, before, now)
            return
        pairs = [(place, old, new) for place, (old, new) in enumerate(zip(before, now, strict=True))]
    else:
        pairs = [(place, old, new) for place, (old, new) in enumerate(zip(before, now, strict=False))]
        if len(now) > len(before):
            yield Change(container, "append", None, MISSING, now[len(before) :])
    for key, old, new in pairs:
        inside = tensors.get(key)
        if old is MISSING or _differs(old, new, inside):
            copied = old is new and inside is not None and inside.copy is not None
            yield Change(container, "set", key, inside.copy if copied and inside is not None else old, new)


def _tensors(container: Container, entries: Entries) -> dict[Any, Contents]:
    """Those among the entries; of what layers may add to, with copies."""
    buffers = container.value._buffers if isinstance(container.value, nn.Module) else ()
    return {
        key: Contents.of_tensor(entry, copies=_is_sum(entry))
        for key, entry in (entries.items() if isinstance(entries, dict) else enumerate(entries))
        if isinstance(entry, Tensor) and not entry.is_inference() and key not in buffers
    }


def _is_sum(tensor: Tensor) -> bool:
    adds = type(tensor) is Tensor and not tensor.requires_grad and tensor.is_floating_point()
    return adds and tensor.numel() <= SUM


def _differs(before: Any, now: Any, inside: Contents | None) -> bool:
    if before is now:
        return inside is not None and inside.is_touched(now)
    return not (type(before) is type(now) and isinstance(now, _PLAIN) and before == now)


def has_plain_only(entries: Iterable[Any]) -> bool:
    """Whether entries are numbers and texts only, which is told of a million of them at once."""
    return _ONLY_PLAIN.issuperset(map(type, entries))


def has_graph(value: Any) -> bool:
    """Whether a tensor with a gradient is in a nest, or in an object."""
    if isinstance(value, LISTS) and has_plain_only(value):
        return False
    leaves = pytree.tree_leaves(value)
    leaves += [entry for leaf in leaves if hasattr(leaf, "__dict__") for entry in _entries(leaf)]
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def _entries(leaf: Any) -> list[Any]:
    if isinstance(leaf, (Tensor, nn.Module, type)) or is_library(type(leaf)):
        return []
    return pytree.tree_leaves(list(vars(leaf).values()))
