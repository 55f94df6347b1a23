"""One value that the steps of a loop keep on each replica, and how those of all of them come together.

A number, a set or a list of numbers that grows by each sample; a list or tensor that grows by entries or rows::

    what was there  +  what each replica has added                      sums, sets
    the mean of what each has, weighed as the losses                    numbers, of one batch: running means
    what was there, then batch by batch  their entries, or one of them  lists: all, their mean, or their sum
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_megatron.mesh.batches import map_tensors
from lightning_megatron.pipeline.elsewhere.containers import MISSING
from lightning_megatron.pipeline.elsewhere.undo import LISTS, is_equal, refill
from lightning_megatron.strategy.carried.joined_entries import entry_of_all
from lightning_megatron.strategy.loss.tables import NUMBERS, Table, found_again

_PLACES = ("sum", "set")  # ways in which entries stay where they are


@dataclass
class ToldValue:
    """A replica's message to the others about a value.

    Attributes:
        added: what it has added: a number, or the entries or rows of each batch; ``None`` where it did something else.
        weights: of its batches.
        sizes: their samples.
    """

    added: Any
    weights: Sequence[float] = ()
    sizes: Sequence[float] = ()


@dataclass
class KeptValue:
    """One that a step writes and a hook reads.

    Attributes:
        table: where it is.
        key: of it.
        start: as the loop has found it.
        ends: how many entries or rows it had, first and after each batch.
        written: whether each batch has written it.
    """

    table: Table
    key: Any
    start: Any
    ends: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    _mark: Any = None

    def __post_init__(self) -> None:
        self.ends = self.ends or [_length(self.start)]
        self._mark = _marked(self.start)

    def now(self, module: nn.Module) -> Any:
        """The present value; :data:`.MISSING` if it is there no more.

        Args:
            module: the user's.
        """
        table = found_again(module, self.table)
        return MISSING if table is None else table.get(self.key, MISSING)

    def end_batch(self, module: nn.Module) -> None:
        """Take note of how long it is after a batch, and of whether it was written."""
        now = self.now(module)
        before, self._mark = self._mark, _marked(now)
        self.written.append(type(self._mark) is not type(before) or self._mark != before)
        self.ends.append(_length(now))

    def tell(self, module: nn.Module, way: Any, batches: Sequence[Mapping[Any, float]]) -> ToldValue:
        """This replica's additions.

        Args:
            module: the user's.
            way: in which values come together, as :data:`.Kinds`; "" if it is unknown.
            batches: of the loop, each with its samples ("sizes") and what it counts in other ways.
        """
        start, now = self.start, self.now(module)
        if not way:
            return ToldValue(None)
        sizes = [each["sizes"] for each in batches]
        if isinstance(now, set):
            return ToldValue(now - start if isinstance(start, set) else now)
        if isinstance(now, (list, deque)):
            before = start if isinstance(start, LISTS) else []
            if way in _PLACES:
                alike = len(now) == len(before) and all(map(_is_number, (*now, *before)))
                return ToldValue([entry - old for entry, old in zip(now, before, strict=True)] if alike else None)
            added = self._rows(list(now), list(before))
            weights = [each.get(way, each["sizes"]) for each in batches]
            if added is None or (way != "each" and any(len(entries) > 1 for entries in added)):
                return ToldValue(None)
            return ToldValue(_sent(added), weights, sizes)
        if not _is_number(now) or (way in _PLACES and not _is_number(start)):
            return ToldValue(None)
        if way not in _PLACES:
            weights = [each[way] for each in batches if way in each]
            return ToldValue(_sent(now) if len(batches) == len(weights) == 1 else None, weights, sizes)
        if isinstance(now, Tensor) and isinstance(start, Tensor) and now.shape != start.shape:
            return ToldValue(_sent(self._rows(now, start)), sizes, sizes)
        return ToldValue(_sent(now - start))

    def put(self, module: nn.Module, told: Sequence[ToldValue], way: Any) -> None:
        """Let it be that of all samples.

        Args:
            module: the user's.
            told: by each replica.
            way: as for :meth:`tell`.
        """
        now = self.now(module)
        value = self.together(now, told, way)
        if isinstance(now, LISTS):
            refill(now, value)
        else:
            self._set(module, now, value)

    def together(self, now: Any, told: Sequence[ToldValue], way: Any) -> Any:
        """The value of all samples.

        Args:
            now: what it is of this replica's.
            told: see :meth:`put`.
            way: likewise.
        """
        start = self.start
        if isinstance(now, set):
            return now.union(*(each.added for each in told))
        if isinstance(now, (list, deque)):
            before = list(start) if isinstance(start, LISTS) else []
            if way in _PLACES:
                rows = zip(before, *(_placed(each.added, now) for each in told), strict=True)
                return [sum(_counting(deltas, way), entry) for entry, *deltas in rows]
            return [*before, *(_placed(entry, now[-1]) for entry in _entries(told, way))] if len(now) else before
        grows = isinstance(told[0].added, list)
        added = [_placed(each, now) for each in (_entries(told, "rows") if grows else [e.added for e in told])]
        if grows:
            return torch.cat([start, *added])
        if way not in _PLACES:
            weights = [each.weights[0] for each in told]
            return sum(value * (weight / sum(weights)) for value, weight in zip(added, weights, strict=True))
        if way == "set" and isinstance(start, Tensor):
            return reduce(lambda one, other: torch.where(other != 0, start + other, one), added, start)
        return sum(_counting(added, way), start)

    def _rows(self, now: Any, before: Any) -> list[Any] | None:
        """Entries that each batch has added at the end; ``None`` if anything else was done."""
        grows = all(one <= other for one, other in pairwise(self.ends)) and len(now) == self.ends[-1]
        if not grows or not (is_equal(now[: len(before)], before) or not len(before)):
            return None
        return [now[one:other] for one, other in pairwise(self.ends)]

    def _set(self, module: nn.Module, now: Any, whole: Any) -> None:
        if self.table.buffers and isinstance(now, Tensor) and now.shape == whole.shape:
            with torch.no_grad():
                now.copy_(whole)
            return
        table = found_again(module, self.table)
        if table is not None:
            table[self.key] = whole


def _marked(value: Any) -> Any:
    """A mark that changes when a value is written, without a look at numbers of tensors."""
    if isinstance(value, Tensor):
        return id(value), value._version
    return len(value) if isinstance(value, LISTS) else value if isinstance(value, NUMBERS) else id(value)


def _length(value: Any) -> int:
    if isinstance(value, Tensor):
        return len(value) if value.ndim else 0
    return len(value) if isinstance(value, LISTS) else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex, Tensor))


def _sent(value: Any) -> Any:
    """A value whose tensors can be told to other processes."""
    return map_tensors(value, lambda tensor: tensor.detach().cpu())


def _placed(value: Any, like: Any) -> Any:
    """A value whose tensors are on the devices on which those of one like it are: the user may keep them on the CPU."""
    devices = [leaf.device for leaf in tree_leaves(like) if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    places = iter(devices if len(devices) == len(tensors) else devices[:1] * len(tensors))
    return map_tensors(value, lambda tensor: tensor.to(next(places, tensor.device)))


def _counting(changes: Sequence[Any], way: Any) -> Sequence[Any]:
    """Of what replicas have changed a number by, all that adds up, or the last one's that has set it."""
    return [change for change in changes if change][-1:] if way == "set" else changes


def _entries(told: Sequence[ToldValue], way: Any) -> list[Any]:
    """The entries of all replicas, batch by batch; as :data:`.Kinds`, and "rows" for a tensor's."""
    batches = zip_longest(*(each.added for each in told))
    if way == "rows":
        return [rows for batch in batches for rows in batch if rows is not None]
    if way == "each":
        return [entry for batch in batches for entries in batch for entry in entries or ()]
    found = []
    for place in range(max(len(each.added) for each in told)):
        some = [each for each in told if place < len(each.added) and each.added[place]]
        if not some:
            continue  # of another loader
        entries = [each.added[place][0] for each in some]
        weights, sizes = [each.weights[place] for each in some], [each.sizes[place] for each in some]
        whole = entry_of_all(entries, way, weights, sizes)
        found += entries if whole is MISSING else [whole]
    return found
