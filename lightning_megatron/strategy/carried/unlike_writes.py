"""Refuses steps that have written otherwise on one replica than on another, though no trial has seen it.

What steps go on from is written from the samples of all replicas where a trial has seen it written
(:mod:`.all_samples`). A step may write behind a condition that no trial has met, and steps of manual optimization are
not tried at all::

    if (y == 9).any(): self.seen[9] += 1      on the replica that has such a sample
    if loss < self.best: self.best = loss     on one, or another number on each

So what a step can write is marked before it, and what it has written is compared after it, in one number that travels
during the backward. Replicas that have written alike (a counter, a mean of what they have gathered) go on, and so do
those that have had different values before (a flag that the constructor sets by the rank).

Most attributes of a large model are numbers that nothing sets but its constructor. So that a step need not look at each
of them, those that no function of the user's sets are marked in a few steps only.
"""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import Started, start_all_reduce
from lightning_megatron.mesh.messages.late import LateAnswer
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.mesh.parts.packages import package_of
from lightning_megatron.pipeline.elsewhere.away import source_of
from lightning_megatron.pipeline.elsewhere.containers import MISSING
from lightning_megatron.pipeline.elsewhere.reachable import attributes_set_by
from lightning_megatron.strategy.carried.carried_values import Carried
from lightning_megatron.strategy.carried.step_stores import line_of_store
from lightning_megatron.strategy.hooks.kept_values import reads_first
from lightning_megatron.strategy.hooks.whole_hooks import may_run_on_one_rank
from lightning_megatron.strategy.loss.over_replicas import OverReplicas, differ_in_sums, sums_of
from lightning_megatron.strategy.loss.tables import NOT_USERS, NUMBERS, Name, Table, sendable, spelled, tables_on
from lightning_megatron.strategy.recheck import is_due

_ENTRIES = (list, set, deque)
_WATCHED = (*NUMBERS, Tensor, tuple, *_ENTRIES)
Told = tuple[tuple[float, ...] | None, tuple[float, ...] | None]
"""Sums of what a value was, if it was a number, and of what it is."""
_SHORT = 64  # entries of a list that are compared one by one


class UnlikeWrites:
    """Compares what the replicas of one stage have written.

    Args:
        module: the user's.
        device: where tensors live.
        replicas: know which values come together.
    """

    def __init__(self, module: nn.Module, device: torch.device, replicas: OverReplicas) -> None:
        self._module, self._device, self._replicas = module, device, replicas
        self._steps, self._tables = 0, list[Table]()
        self._keys: dict[int, tuple[tuple[Any, ...], frozenset[Any]]] = {}
        self._grown = False
        self._owners: dict[str, nn.Module] = {}
        self._marks: dict[tuple[int, Any], tuple[Any, Any]] = {}
        self._lasting: dict[Name, bool] = {}
        self._found: dict[Name, Any] = {}
        self._looked: dict[Name, Any] | None = None
        self._under_way: tuple[Tensor, Started | None] | None = None
        self._own = set[Name]()
        self._unread: tuple[LateAnswer, dict[Name, Any]] | None = None

    def begin(self) -> None:
        """Before a step: mark what it can write."""
        self._steps += 1
        due = is_due(self._steps, first=4)
        if due:  # objects may have come
            self._tables = list(self._of_user())
        if due or self._grown:
            self._grown, self._keys = False, {id(table.values): self._writable(table) for table in self._tables}
        self._marks = {
            (id(table.values), key): (value, _mark(value))
            for table in self._tables
            for key in (table.values if due else self._keys[id(table.values)][0])
            if isinstance(value := table.values.get(key), _WATCHED) and key not in NOT_USERS
        }

    def look(self) -> None:
        """Look at the writes where the step does not end, before other stages tell theirs and compare themselves."""
        self._looked = dict(self._written())

    def start(self) -> None:
        """After the step: begin to compare what it has written. Collective over the replicas of this stage."""
        self._found, self._looked = dict(self._written()) if self._looked is None else self._looked, None
        now = ((spelled(name), sums) for name, (_, sums) in self._found.items())
        number = float(sum(zlib.crc32(repr(each).encode()) for each in now))
        mine = torch.tensor([number, -number], dtype=torch.float64, device=self._device)
        self._under_way = start_all_reduce(mine, self._replicas.group, maximum=True)

    def finish(self) -> None:
        """Read the comparison; on an accelerator that of the step before, as the host would have to wait for this one.
        Collective over these replicas.

        Raises:
            RuntimeError: they have written something otherwise.
        """
        if self._under_way is None:
            return
        (extremes, work), self._under_way = self._under_way, None
        if work is not None:
            work.wait()
        read, self._unread = self._unread, (LateAnswer(extremes[0] != -extremes[1]), self._found)
        if self._device.type == "cpu":
            read, self._unread = self._unread, None
        if read is None or not read[0]:
            return
        said = {sendable(name, self._module): sums for name, sums in read[1].items()}
        names = dict.fromkeys(name for each in objects.gather(list(said), self._replicas.group) for name in each)
        said = {name: said.get(name) or self._unchanged(name) for name in names}
        told = objects.gather(said, self._replicas.group)
        for name in names:
            before, now = ([each[name][at] for each in told] for at in (0, 1))
            if not any(differ_in_sums(now[0], each) for each in now[1:]):
                continue
            if any(differ_in_sums(before[0], each) for each in before[1:] if None not in (before[0], each)):
                self._own.add(name)  # each has had its own before
            elif may_run_on_one_rank(self._module, "training_step"):
                self._own.add(name)
                rank_zero_warn(
                    f"`training_step` has written `{spelled(name)}` otherwise on one replica than on another, and its "
                    "code asks for the rank: each goes on from its own. One process writes it from all samples."
                )
            else:
                self._refuse(name)

    def _unchanged(self, name: Name) -> Told:
        """Sums of a value on this replica, where another has written it and this one has not."""
        for table in self._tables:
            for key, value in table.values.items():
                if isinstance(value, NUMBERS) and sendable((table.name, key), self._module) == name:
                    return sums_of(value), sums_of(value)
        return None, None

    def _of_user(self) -> Iterator[Table]:
        """Attributes and buffers of modules, and what is in them; but for what has other means over replicas."""
        owners = self._owners = dict(self._module.named_modules())
        spared = Parts([name for name, child in owners.items() if isinstance(child, (Metric, _BatchNorm))])
        for table in tables_on([(name, child) for name, child in owners.items() if name not in spared]):
            owner = owners.get(table.name)
            if table.buffers or owner is None or package_of(type(owner)) != "torch":
                yield table

    def _writable(self, table: Table) -> tuple[tuple[Any, ...], frozenset[Any]]:
        """Keys of a table that any step may write, and all keys that the table has."""
        plain = table.name in self._owners and not table.buffers
        keys = (
            key
            for key, value in table.values.items()
            if key not in NOT_USERS
            and (not plain or key in self._set_by_code or isinstance(value, (Tensor, *_ENTRIES)))
        )
        return tuple(keys), frozenset(table.values)

    @functools.cached_property
    def _set_by_code(self) -> set[str]:
        """Attributes that functions of the user's set."""
        return attributes_set_by(self._module)

    def _looked_at(self, table: Table, *, everywhere: bool) -> list[tuple[Any, Any]]:
        """The values of a table that the step may have written."""
        keys, known = self._keys[id(table.values)]
        if everywhere:
            return list(table.values.items())
        if len(table.values) > len(known):
            self._grown = True
            keys = (*keys, *(key for key in table.values if key not in known))
        return [(key, table.values[key]) for key in keys if key in table.values]

    def _written(self) -> Iterator[tuple[Name, Any]]:
        """Names of what the step has written and goes on from, and comes together in no other way; with the sums of
        what it was, if it was a number, and of what it is.
        """
        everywhere = is_due(self._steps, first=4)
        for table in self._tables:
            for key, now in self._looked_at(table, everywhere=everywhere):
                before, mark = self._marks.get((id(table.values), key), (MISSING, None))
                if not isinstance(now, _WATCHED) or key in NOT_USERS or _is_as_marked(now, before, mark):
                    continue
                name = (spelled((table.name, key)), None) if isinstance(now, _ENTRIES) else (table.name, key)
                if source_of((before, now)) is not None or not (table.buffers or self._lasts(table.name, key)):
                    continue
                if not (self._is_known((table.name, key)) or self._is_known(name) or self._is_far(name, now)):
                    sums = sums_of(now)
                    if sums is not None and sendable(name, self._module) not in self._own:
                        yield name, (sums_of(before) if isinstance(before, NUMBERS) else None, sums)

    def _lasts(self, owner: str, key: Any) -> bool:
        """Whether a later step reads a value."""
        if (owner, key) not in self._lasting:
            self._lasting[owner, key] = reads_first(self._module, owner, key)
        return self._lasting[owner, key]

    def _is_known(self, name: Name) -> bool:
        carried: Carried = self._replicas.carried
        said = sendable(name, self._module)
        comes = self._replicas.comes_together(name) or said in carried.ways or said in carried.passed
        return comes or name[1] in carried.clocks

    def _is_far(self, name: Name, now: Any) -> bool:
        """Whether a value is on an accelerator, which would have to be waited for, and a trial has seen it written
        alike; it is compared now and then.
        """
        far = isinstance(now, Tensor) and now.device.type != "cpu"
        return far and name in self._replicas.carried.seen and not is_due(self._steps, first=4)

    def _refuse(self, name: Name) -> None:
        words = [*name[0].split("."), str(name[1])]  # of an entry, the line that stores to what it is in
        lines = (line_of_store(self._replicas.carried.called, word) for word in reversed(words))
        line = next(filter(None, lines), "")
        raise RuntimeError(
            f"`training_step` has written `{spelled(name)}`{f' ({line})' if line else ''} and goes on from it, and one "
            f"of the {self._replicas.group.size()} replicas has written it otherwise than another, each from its own "
            "samples, where one process writes it from all of them. No step that was tried had written it (a step of "
            "manual optimization is not tried). Write what the replicas gather (`self.all_gather(x)`, in conditions "
            "too), write it in the first step already, or pass `whole_batch_loss=False` if each replica's own is meant."
        )


def _mark(value: Any) -> Any:
    """A mark that changes when a value is written to in place."""
    if isinstance(value, Tensor):
        return None if source_of(value) is not None or value.is_inference() else value._version
    if isinstance(value, _ENTRIES):
        return value.copy() if len(value) <= _SHORT else len(value)
    return None


def _is_as_marked(now: Any, before: Any, mark: Any) -> bool:
    """Whether a value is what it was."""
    if now is not before:
        plain = isinstance(now, (*NUMBERS, tuple)) and type(now) is type(before) and not isinstance(now, tuple)
        return plain and bool(now == before)
    if isinstance(now, Tensor):
        return bool(_mark(now) == mark)
    if isinstance(now, _ENTRIES):
        if isinstance(mark, int):
            return len(now) == mark
        return len(now) == len(mark) and (now == mark if isinstance(now, set) else all(map(is_, now, mark)))
    return True
