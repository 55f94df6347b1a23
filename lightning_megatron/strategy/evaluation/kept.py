"""What steps of evaluation keep for the hooks behind them, made that of all replicas' samples.

A replica's steps see its own samples, and so does what they count and collect on the module. One process has those of
all. How a value comes together is found out by a trial (:mod:`.logged`), for the names that hooks read; behind the last
batch, before the first of these hooks, replicas tell each other what they have::

    self.right += (p == y).sum()      what was there, and the sum of what each has added
    self.outputs.append(self(x))      an entry for each batch, of the samples of all replicas
    self.losses.append(loss)          likewise, their mean or their sum
    self.best = max(self.best, x)     none of these: each keeps its own, and the user is told

Hooks that know of replicas (:mod:`.reading_hooks`) find what their own has left. What callbacks collect themselves in
hooks behind each batch stays their replica's, and the user is told if replicas have not the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_megatron.mesh.batches import batch_size_of, map_tensors
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.pipeline.elsewhere.containers import MISSING
from lightning_megatron.pipeline.elsewhere.undo import LISTS, is_equal, refill
from lightning_megatron.strategy.callbacks.loop_ends import LoopEnds
from lightning_megatron.strategy.evaluation.collected import Collected
from lightning_megatron.strategy.evaluation.logged import LoggedInEvaluation
from lightning_megatron.strategy.evaluation.reading_hooks import names_read
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of
from lightning_megatron.strategy.loss.over_replicas import unlike_values
from lightning_megatron.strategy.loss.tables import Name, Table, found_again, sendable, spelled
from lightning_megatron.strategy.loss.traces import Traces, as_it_is
from lightning_megatron.strategy.loss.written import merged, total

_TRIES = 4  # loops in whose first batch it is tried how values come together, as long as some are unknown


@dataclass
class _Value:
    """One that a step writes and a hook reads.

    Attributes:
        table: where it is.
        key: of it.
        start: as the loop has found it.
        ends: how many entries or rows it had, first and behind each batch.
    """

    table: Table
    key: Any
    start: Any
    ends: list[int] = field(default_factory=list)


@dataclass
class _Told:
    """What a replica tells the others of a value.

    Attributes:
        added: what it has added: a number, or the entries or rows of each batch; ``None`` where it did something else.
        weights: of its batches.
        sizes: their samples.
    """

    added: Any
    weights: Sequence[float] = ()
    sizes: Sequence[float] = ()


class KeptForHooks(Callback):
    """Puts what steps of evaluation keep together over the replicas, behind each loop.

    Args:
        module: the user's module.
        trainer: of the run.
        mesh: the grid.
        logged: finds out how values come together.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        trainer: pl.Trainer,
        mesh: ParallelMesh,
        logged: LoggedInEvaluation,
    ) -> None:
        self._module, self._logged = module, logged
        self._group, self._replicas = mesh.group("data_parallel"), mesh.layout.data
        self._read: dict[str, set[str]] = {}
        self._tries, self._told = dict[tuple[str, tuple[Any, ...]], int](), set[Name]()
        self._name, self._loader = "", ()
        self._traces: Traces | None = None
        self._latest: Traces | None = None
        self._values: dict[Name, _Value] = {}
        self._batches: list[dict[Any, float]] = []
        self._collected: Collected | None = None
        if mesh.layout.data > 1 and logged.tries:
            callbacks = callbacks_of(trainer)
            others = [callback for callback in callbacks if not isinstance(callback, KeptForHooks)]
            self._read = {loop: names_read(module, others, loop) for loop in ("validation", "test")}
            self._collected = Collected(others, module, self._group)
            place = 1 + max((at for at, each in enumerate(others) if isinstance(each, LoopEnds)), default=-1)
            callbacks[:] = [*others[:place], self, *others[place:]]

    def __reduce__(self) -> Any:
        """A run belongs to its processes: copies of its Trainer have a callback that does nothing."""
        return Callback, ()

    def remove(self, trainer: pl.Trainer) -> None:
        """Take it out of the Trainer's callbacks."""
        callbacks = callbacks_of(trainer)
        callbacks[:] = [callback for callback in callbacks if callback is not self]

    @contextmanager
    def around(self, name: str, batch: Any, loader: Sequence[Any]) -> Iterator[None]:
        """Around a step.

        Args:
            name: of the user's step.
            batch: of this replica.
            loader: number of its loader, where there are several.
        """
        self._begin(name, tuple(loader))
        yield
        self._note(name, batch)

    def _begin(self, name: str, loader: tuple[Any, ...]) -> None:
        self._logged.start = None
        if (self._name and loader == self._loader) or not self._read.get(name.removesuffix("_step")):
            return
        self._latest = Traces(self._module, beside=True)
        if not self._name:
            self._name, self._batches, self._values, self._traces = name, [], {}, self._latest
        self._loader = loader
        self._tries[name, loader] = tries = self._tries.get((name, loader), 0) + 1
        self._logged.start = self._latest if tries <= _TRIES else None

    def _note(self, name: str, batch: Any) -> None:
        if self._traces is None or name != self._name:
            return
        ways = self._ways(name)
        latest, self._latest = self._latest, None
        if latest is not None:  # what another loader's batches wrote first has been the same so far
            new = self._found(
                latest, [value for value, way in ways.items() if way != "same" and value not in self._values]
            )
            for value, found in new.items():
                start = self._traces.start_of(value)
                if start is None or is_equal(start[1], found.start):
                    found.ends *= 1 + len(self._batches)
                    self._values[value] = found
        self._logged.start = None
        weigh = {way for way in ways.values() if callable(way)}
        self._batches.append({"sizes": float(batch_size_of(batch)), **{way: float(way(batch)) for way in weigh}})
        for each in self._values.values():
            each.ends.append(_length(self._now(each)))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All batches are done on all ranks."""
        self._compare("train")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All batches are done on all ranks."""
        self._end("validation")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All batches are done on all ranks."""
        self._end("test")

    def _end(self, loop: str) -> None:
        self._together(f"{loop}_step")
        self._compare(loop)

    def _compare(self, loop: str) -> None:
        if self._collected is not None:
            self._collected.compare(loop)

    def _ways(self, name: str) -> dict[Name, Any]:
        """By name of a value that hooks read, how it comes together."""
        read = self._read[name.removesuffix("_step")]
        return {value: way for value, way in self._logged.written(name).items() if _is_read(value, read)}

    def _found(self, traces: Traces, names: Sequence[Name]) -> dict[Name, _Value]:
        """Where values are, and what they were at the start of the loop."""
        found = {}
        for name in names:
            if (kept := traces.start_of(name)) is not None:
                found[name] = _Value(kept[0], name[1], kept[1], [_length(kept[1])])
        return found

    def _now(self, value: _Value) -> Any:
        table = found_again(self._module, value.table)
        return MISSING if table is None else table.get(value.key, MISSING)

    def _together(self, name: str) -> None:
        """Let every replica have what one process has; collective over the replicas."""
        traces, self._traces = self._traces, None
        if traces is None or name != self._name:
            return
        self._name = ""
        ways, read = self._ways(name), self._read[name.removesuffix("_step")]
        told = {value: self._tell(each, ways[value]) for value, each in self._values.items()}
        every = [each or {} for each in objects.gather(told or None, self._group)]
        known = [value for value in self._values if all(value in e and e[value].added is not None for e in every)]
        for value in known:
            self._put(self._values[value], [each[value] for each in every], ways[value])
        others = ((value, now) for value, (_, now) in traces.changes().items() if value not in known)
        apart = {value: now for value, now in others if ways.get(value) != "same" and _is_read(value, read)}
        self._say(apart, name)
        if not objects.gather(bool(apart) or None, self._group).count(True):
            self._tries.update({(name, loader): _TRIES for step, loader in self._tries if step == name})

    def _tell(self, value: _Value, way: Any) -> _Told:
        """What this replica has added to a value."""
        start, now = value.start, self._now(value)
        if not way:
            return _Told(None)
        sizes = [each["sizes"] for each in self._batches]
        if isinstance(now, set):
            return _Told(now - start if isinstance(start, set) else now)
        if isinstance(now, (list, deque)):
            before = start if isinstance(start, LISTS) else []
            if way == "sum":
                alike = len(now) == len(before) and all(map(_is_number, (*now, *before)))
                return _Told([entry - old for entry, old in zip(now, before, strict=True)] if alike else None)
            added = self._rows(list(now), list(before), value.ends)
            weights = [each.get(way, each["sizes"]) for each in self._batches]
            if added is None or (way != "each" and any(len(entries) > 1 for entries in added)):
                return _Told(None)
            return _Told(_sent(added), weights, sizes)
        if way != "sum" or not _is_number(now) or not _is_number(start):
            return _Told(None)
        if isinstance(now, Tensor) and isinstance(start, Tensor) and now.shape != start.shape:
            return _Told(_sent(self._rows(now, start, value.ends)), sizes, sizes)
        return _Told(_sent(now - start))

    @staticmethod
    def _rows(now: Any, before: Any, ends: Sequence[int]) -> list[Any] | None:
        """What each batch has added at the end; ``None`` if anything else was done."""
        grows = all(one <= other for one, other in pairwise(ends)) and len(now) == ends[-1]
        if not grows or not (is_equal(now[: len(before)], before) or not len(before)):
            return None
        return [now[one:other] for one, other in pairwise(ends)]

    def _put(self, value: _Value, told: Sequence[_Told], way: Any) -> None:
        """Let a value be that of all samples."""
        now, start = self._now(value), value.start
        if isinstance(now, set):
            refill(now, now.union(*(each.added for each in told)))
        elif isinstance(now, (list, deque)):
            before = list(start) if isinstance(start, LISTS) else []
            if way == "sum":
                rows = zip(before, *(_placed(each.added, now) for each in told), strict=True)
                refill(now, [sum(deltas, entry) for entry, *deltas in rows])
            else:
                entries = _entries(told, way)
                refill(now, [*before, *(_placed(entry, now[-1]) for entry in entries)] if len(now) else before)
        else:
            grows = isinstance(told[0].added, list)
            added = [_placed(each, now) for each in (_entries(told, "rows") if grows else [e.added for e in told])]
            self._set(value, now, torch.cat([start, *added]) if grows else sum(added, start))

    def _set(self, value: _Value, now: Any, whole: Any) -> None:
        if value.table.buffers and isinstance(now, Tensor) and now.shape == whole.shape:
            with torch.no_grad():
                now.copy_(whole)
            return
        table = found_again(self._module, value.table)
        if table is not None:
            table[value.key] = whole

    def _say(self, apart: Mapping[Name, Any], name: str) -> None:
        """Warn of what each replica has kept of its own samples, if it is not the same on all of them."""
        mine: dict[Name, list[Any]] = {}
        for value, now in apart.items():
            mine.setdefault(sendable(value, self._module), []).append(as_it_is(now))
        found = [each for each in unlike_values(mine, self._group) if each not in self._told]
        self._told.update(found)
        if found:
            names = ", ".join(f"`{spelled(each)}`" for each in found)
            behind = f"on_{name.removesuffix('_step')}_batch_end"
            other = f", or `{behind}`," if is_overridden(behind, self._module) else ""
            rank_zero_warn(
                f"`{name}`{other} writes {names} from the samples of each of the {self._replicas} replicas, where one "
                "process writes it from all of them, and how they come together is not known: the hooks that read it "
                "see those of their replica. Gather what they need (`self.all_gather`), use a torchmetrics object, or "
                "pass `whole_batch_loss=False` if each replica's own is meant."
            )


def _is_read(name: Name, read: set[str]) -> bool:
    """Whether code that uses some names may read a value: an attribute, a global, or what is in one."""
    table, key = name
    return not read.isdisjoint(table.split(".") if table else [str(key)])


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


def _entries(told: Sequence[_Told], way: Any) -> list[Any]:
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
        whole = total(entries) if way == "total" else merged(entries, weights, sizes)
        found += entries if whole is MISSING else [whole]
    return found
