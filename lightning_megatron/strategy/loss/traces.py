"""Writes of a run of the user's step: noted, and put back.

A step may count its calls, keep a running mean, append to a list, draw from a generator. A trial of the step must leave
none of it behind; and what the steps of the parts of a batch write must add up to what the step of the whole batch
writes, see :mod:`.written`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torchmetrics import Metric

from lightning_megatron.data_parallel.windows.window import Window, disguised
from lightning_megatron.mesh.draws.given_again import state_of
from lightning_megatron.mesh.parts.names import Parts, outwards, parent
from lightning_megatron.pipeline.elsewhere.absent import Absent
from lightning_megatron.pipeline.elsewhere.away import STATE, Away, source_of
from lightning_megatron.pipeline.elsewhere.containers import MISSING
from lightning_megatron.pipeline.elsewhere.reachable import LONG
from lightning_megatron.pipeline.elsewhere.undo import LISTS, Kept, has_graph, has_plain_only, is_array, is_equal
from lightning_megatron.strategy.hooks.kept_hooks import HookTables, KeptHooks
from lightning_megatron.strategy.hooks.kept_values import read_by_hooks, reads_first
from lightning_megatron.strategy.logs.weight_writes import WeightWrites
from lightning_megatron.strategy.loss.muted_loggers import muted
from lightning_megatron.strategy.loss.tables import (
    NOT_USERS,
    NUMBERS,
    Name,
    Table,
    appended_names,
    assigned_names,
    is_of_scheduler,
    tables_beside,
    tables_of_optimizers,
    tables_on,
    wrap_iterators,
)

_SHORT = 64  # entries of a list that are compared one by one
_SMALL = 1 << 16  # bytes of an array that is compared
_IMMUTABLE = frozenset((*NUMBERS, type(None)))

Changes = dict[Name, tuple[Any, Any]]
"""Value before and after."""


class Traces:
    """The state of a module at one moment, and of what its code writes to besides.

    Args:
        module: the user's module, with all modules in it.
        only: names of those modules in it that count; all by default.
        beside: also what does not hang on the module: classes, globals, closures, and whether the Trainer is asked to
            stop. Iterators that are found are replaced by ones that can be taken back.
        hooks: where the module keeps hooks, if that is known.

    Attributes:
        buffers: names of what is a buffer.
        weights: notes which weights code writes that runs inside of its ``noted()``.
        assigned: names of tensors, lists and entries of dictionaries that it set, whatever they were before.
        module: as given.
    """

    def __init__(
        self,
        module: nn.Module,
        only: Collection[str] | None = None,
        *,
        beside: bool = False,
        hooks: HookTables | None = None,
    ) -> None:
        named = module.named_modules() if only is None else ((name, module.get_submodule(name)) for name in only)
        modules = list(named)
        metrics = Parts([name for name, child in modules if isinstance(child, Metric)])
        tables = list(tables_on(modules, inner=not beside))
        if beside:
            tables += [*tables_beside(module), *tables_of_optimizers(module)]
            for table in tables:
                wrap_iterators(table)
        self.weights, self.module, self.assigned = WeightWrites(module), module, set[Name]()
        self._kept = [(table, Kept(table.values, table.keys)) for table in tables]
        self._outside = {table.name for table in tables if table.is_outside}
        self._hooks = KeptHooks(hooks or HookTables(module))
        self._compared = [each for each in self._kept if each[0].name not in metrics] if metrics else self._kept
        self._trainer = getattr(module, "_trainer", None) if beside else None
        self._stops = self._trainer is not None and self._trainer.should_stop
        self._beside, self._appended = beside, appended_names(type(module)) if beside else ()
        self._entries = assigned_names(type(module)) if beside else set()
        self.buffers = {(table.name, key) for table, kept in self._kept if table.buffers for key in kept.values}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around a run of code that is undone: which weights it writes is noted, and loggers hear nothing of it."""
        with muted(self.module), self.weights.noted():
            yield

    def lasting(self, names: Collection[Name]) -> set[Name]:
        """Names that later steps read: buffers, and those of ``names`` that the code of their modules reads first;
        whoever reads a class or a global; and all that schedulers of learning rates keep.
        """
        others = (name for name in names if name[0] in self._outside or is_of_scheduler(name))
        return self.buffers | {*others, *(name for name in names if reads_first(self.module, *name))}

    def read(self, names: Collection[Name]) -> set[Name]:
        """Those of ``names`` that the user's hooks behind and between steps may read."""
        return read_by_hooks(self.module, names)

    def changes(self) -> Changes:
        """Numbers, tensors, lists and states written since: name of the table and key -> value before and now."""
        found: Changes = {}
        for table, kept in self._compared:
            entries = table.entries
            for key in list(kept.table):
                if key not in kept.values and (entries or key in NOT_USERS):
                    continue  # what a list has grown by is for the list's own table
                value, now = kept.values.get(key, (MISSING,))[0], kept.table[key]
                if now is value and type(now) in _IMMUTABLE:
                    continue  # most attributes
                plain = now is value and isinstance(now, LISTS) and has_plain_only(now)
                if not self._counts(key, value, now) or (not plain and source_of((value, now)) is not None):
                    continue  # no number, or one that another stage judges
                before, after = kept.earlier(key), as_it_is(now)
                passing = not isinstance(now, Tensor) and table.name not in self._appended and has_graph(now)
                if passing or is_equal(before, after):
                    continue  # what has a graph is read in the step, but for lists that the step's own code appends to
                found[table.name, key] = (before, after)
                if self.weights.assigns(now) or {table.name, key} & self._entries:
                    self.assigned.add((table.name, key))
        return found

    def values(self) -> Iterator[tuple[Name, Any]]:
        """Names and values, as they were."""
        for table, kept in self._compared:
            yield from (((table.name, key), kept.earlier(key)) for key in kept.values)

    def rebound(self) -> dict[Name, tuple[MutableMapping[Any, Any], Any]]:
        """Names that stand for another object than before: where they are kept."""
        found: dict[Name, tuple[MutableMapping[Any, Any], Any]] = {}
        for table, kept in self._kept:
            for key in () if table.entries or table.values is not kept.table else list(kept.table):
                before = kept.values.get(key, (MISSING,))[0]
                if kept.table[key] is not before and (key in kept.values or key not in NOT_USERS):
                    found[table.name, key] = kept.table, key
        return found

    def refilled(self) -> list[Name]:
        """Lists that have other entries than before."""
        lists = [
            (table.name, key, kept.earlier(key), value[0])
            for table, kept in self._kept
            for key, value in kept.values.items()
            if isinstance(value[0], LISTS)
        ]
        return [(name, key) for name, key, before, now in lists if list(map(id, before)) != list(map(id, now))]

    def _counts(self, key: Any, value: Any, now: Any) -> bool:
        """Whether a value is compared; what a list holds, by its own table."""
        if isinstance(now, (*NUMBERS, Tensor)) or (self._beside and is_array(now)):
            return True
        if not self._beside or now is None:
            return self._beside and value is not None and value is not MISSING
        if isinstance(now, (*LISTS, dict)):
            return key is None or (now is not value and _is_plain(now))
        return state_of(now) is not None or (isinstance(now, tuple) and _is_plain(now))

    def put_back(self, *, hooks: bool = True) -> None:
        """Leave everything as it was, or everything but the modules' hooks."""
        if self._trainer is not None:
            self._trainer.should_stop = self._stops
        for _, kept in self._kept:
            kept.put_back(NOT_USERS)
        if hooks:
            self._hooks.put_back()
        self.weights.put_back()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Everything as it was, for a while."""
        now = Traces(self.module, beside=self._beside)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()

    def tables(self, names: Sequence[Name]) -> list[tuple[Table, Any]]:
        """Tables in which the values called ``names`` are kept."""
        found = []
        for name, key in names:
            tables = [(table, kept) for table, kept in self._kept if table.name == name]
            found.append((next((table for table, kept in tables if key in kept.values), tables[0][0]), key))
        return found

    def start_of(self, name: Name) -> tuple[Table, Any] | None:
        """Table and starting value of a value, or :data:`MISSING`; ``None`` if its table was not there."""
        kept = [each for each in self._kept if each[0].name == name[0]]
        if not kept:
            return None
        table, values = next((each for each in kept if name[1] in each[1].values), kept[0])
        return table, values.earlier(name[1])

    def plain(self, outside: Collection[str]) -> list[Table]:
        """Attributes, dictionaries and objects, but those of modules in ``outside``, and long ones."""
        parts, tables = Parts(outside), (table for table, _ in self._compared if type(table.values) is dict)
        return [table for table in tables if table.name not in parts and len(table.values) <= LONG]


@contextmanager
def without_zero_weights(module: nn.Module, windows: Sequence[Window] = ()) -> Iterator[None]:
    """While it lasts, matrices that are all zero hold other numbers, the same on all ranks.

    A head that begins with zeros gives every sample one loss, whatever weighs the samples, and a trial would learn
    nothing from the first batch; the gradients are unlike nonetheless.

    Args:
        module: with the matrices.
        windows: of those that replicas share out; they hold other numbers wherever they are whole.
    """
    spread = {id(weight) for window in windows for weight in window.parameters}
    others = (weight for weight in nn.Module.parameters(module) if id(weight) not in spread)
    with _without_zeros(others), disguised(windows, _without_zeros):
        yield


@contextmanager
def _without_zeros(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    with torch._C.DisableTorchFunction():  # looking at a weight is no use of it, for whoever watches the step
        zeros = [
            weight.data
            for weight in weights
            if weight.ndim > 1 and weight.is_floating_point() and _has_numbers(weight) and not weight.data.any()
        ]
        for weight in zeros:
            rows, columns = (torch.arange(1.0, size + 1, dtype=torch.float64).sin() for size in weight.shape[:2])
            numbers = torch.outer(rows.to(weight), columns.to(weight))
            weight.copy_(numbers.view(*weight.shape[:2], *(1 for _ in weight.shape[2:])))
    try:
        yield
    finally:
        for weight in zeros:
            weight.zero_()
        if zeros:
            torch.clear_autocast_cache()  # it may hold what a trial has cast


def _has_numbers(weight: Tensor) -> bool:
    return not (weight.is_meta or isinstance(weight.data, FakeTensor) or 0 in weight.stride() or not weight.numel())


def as_it_is(value: Any) -> Any:
    """A value, to be compared and kept."""
    if type(value) is Tensor:
        return value.detach().clone()
    if isinstance(value, LISTS) or is_array(value):
        return value.copy()
    return state_of(value) or value


def mark_of(value: Any) -> Any:
    """Mark of a tensor, list or array that changes when it is written to in place."""
    if isinstance(value, Tensor):
        elsewhere = value.__class__ is Absent or value.__class__ is Away  # another stage judges it
        return None if elsewhere or value.is_inference() else value._version
    if isinstance(value, list):
        return value.copy() if len(value) <= _SHORT else len(value)
    return value.copy() if value.ndim and value.nbytes <= _SMALL else None


def is_as_marked(value: Any, mark: Any) -> bool:
    """Whether a value still has the mark that :func:`mark_of` gave it."""
    if isinstance(mark, list):
        return len(value) == len(mark) and all(map(is_, value, mark))
    if is_array(mark):
        return bool(value.shape == mark.shape and value.tobytes() == mark.tobytes())
    return bool(mark_of(value) == mark)


def _is_plain(value: Any) -> bool:
    """Whether a list, tuple or dictionary holds numbers and tensors only."""
    entries = value.values() if isinstance(value, dict) else value
    return all(isinstance(entry, (*NUMBERS, Tensor, type(None))) for entry in entries)


class LastStageWrites:
    """Lets one of several runs of a step on a micro-batch write what the step writes.

    A rank of several virtual stages runs the step's code before the layers once for each of them, and the last of these
    runs gets furthest. What the others write outside the layers is put back; into buffers of which the last one makes
    stand-ins, it goes after all.

    Args:
        module: the user's module.
        layers: names of the trunk's layers, which run on one virtual stage each.
        hooks: where the module keeps hooks.
        also: which modules outside the layers are followed, besides their owners and metrics.
        once: parts outside the layers of which nothing is put back, as only the first of the runs has them.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[str],
        hooks: HookTables,
        also: Callable[[nn.Module], bool],
        once: Parts | None = None,
    ) -> None:
        self._module, self._hooks = module, hooks
        inside, once = Parts(layers), once or Parts(())
        around = {above for layer in layers for above in outwards(parent(layer))}
        others = (name for name, child in module.named_modules() if isinstance(child, Metric) or also(child))
        self._names = sorted({"", *around, *(name for name in others if name not in inside and name not in once)})

    @contextmanager
    def undone(self, *, passes_on: bool = True, hooks: bool = True) -> Iterator[None]:
        """Around a run on any but the last virtual stage of this rank.

        Args:
            passes_on: whether what it writes of real values goes into buffers of which the last makes stand-ins.
            hooks: whether hooks that it registers go as well. They stay where no further run registers them: what is
                noted about them comes from the last stage, and hooks do not.
        """
        traces = Traces(self._module, self._names, hooks=self._hooks)
        try:
            yield
        finally:
            with torch._C.DisableTorchFunction():  # a step that is watched must not read what other stages have
                for (name, key), (_, now) in traces.changes().items() if passes_on else ():
                    if (name, key) in traces.buffers and isinstance(now, Tensor):
                        STATE.undone[f"{name}.{key}" if name else key] = now
                traces.put_back(hooks=hooks)
