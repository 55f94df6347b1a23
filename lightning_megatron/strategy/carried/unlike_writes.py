"""What a step has written otherwise on one replica than on another, though no trial has seen it: refused there.

What steps go on from is written from the samples of all replicas where a trial has seen it written
(:mod:`.all_samples`). A step may write behind a condition that no trial has met, and steps of manual optimization are
not tried at all::

    if (y == 9).any(): self.seen[9] += 1      on the replica that has such a sample
    if loss < self.best: self.best = loss     on one, or another number on each

So what a step can write is marked before it, and what it has written is compared behind it, in one number that travels
during the backward. Replicas that have written alike (a counter, a mean of what they have gathered) go on.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import Started, start_all_reduce
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.pipeline.elsewhere.away import source_of
from lightning_megatron.pipeline.elsewhere.containers import MISSING
from lightning_megatron.strategy.carried.carried_values import Carried
from lightning_megatron.strategy.carried.step_stores import line_of_store
from lightning_megatron.strategy.hooks.kept_values import reads_first
from lightning_megatron.strategy.loss.over_replicas import OverReplicas, differ_in_sums, sums_of
from lightning_megatron.strategy.loss.tables import NOT_USERS, NUMBERS, Name, Table, sendable, spelled, tables_on
from lightning_megatron.strategy.recheck import is_due

_ENTRIES = (list, set, deque)
_WATCHED = (*NUMBERS, Tensor, tuple, *_ENTRIES)
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
        self._marks: dict[tuple[int, Any], tuple[Any, Any]] = {}
        self._lasting: dict[Name, bool] = {}
        self._found: dict[Name, Any] = {}
        self._under_way: tuple[Tensor, Started | None] | None = None

    def begin(self) -> None:
        """Before a step: mark what it can write."""
        self._steps += 1
        if is_due(self._steps, first=4):  # objects may have come
            self._tables = list(self._of_user())
        self._marks = {
            (id(table.values), key): (value, _mark(value))
            for table in self._tables
            for key, value in table.values.items()
            if isinstance(value, _WATCHED) and key not in NOT_USERS
        }

    def start(self) -> None:
        """Behind the step: begin to compare what it has written. Collective over the replicas of this stage."""
        self._found = dict(self._written())
        number = float(sum(zlib.crc32(repr((spelled(name), sums)).encode()) for name, sums in self._found.items()))
        mine = torch.tensor([number, -number], dtype=torch.float64, device=self._device)
        self._under_way = start_all_reduce(mine, self._replicas.group, maximum=True)

    def finish(self) -> None:
        """Wait for the comparison. Collective over these replicas.

        Raises:
            RuntimeError: they have written something otherwise.
        """
        if self._under_way is None:
            return
        (extremes, work), self._under_way = self._under_way, None
        if work is not None:
            work.wait()
        highest, below = extremes.tolist()
        if highest == -below:
            return
        said = {sendable(name, self._module): sums for name, sums in self._found.items()}
        told = objects.gather(said, self._replicas.group)
        for name in dict.fromkeys(name for each in told for name in each):
            if any(differ_in_sums(told[0].get(name), each.get(name)) for each in told[1:]):
                self._refuse(name)

    def _of_user(self) -> Iterator[Table]:
        """Attributes and buffers of modules, and what is in them; but for what has other means over replicas."""
        modules = list(self._module.named_modules())
        spared = Parts([name for name, child in modules if isinstance(child, (Metric, _BatchNorm))])
        for table in tables_on([(name, child) for name, child in modules if name not in spared]):
            owner = dict(modules).get(table.name)
            if table.buffers or owner is None or type(owner).__module__.split(".")[0] != "torch":
                yield table

    def _written(self) -> Iterator[tuple[Name, Any]]:
        """Names of what the step has written and goes on from, and comes together in no other way; with its sums."""
        for table in self._tables:
            for key, now in list(table.values.items()):
                before, mark = self._marks.get((id(table.values), key), (MISSING, None))
                if not isinstance(now, _WATCHED) or key in NOT_USERS or _is_as_marked(now, before, mark):
                    continue
                name = (spelled((table.name, key)), None) if isinstance(now, _ENTRIES) else (table.name, key)
                if source_of((before, now)) is not None or not (table.buffers or self._lasts(table.name, key)):
                    continue
                if not (self._is_known((table.name, key)) or self._is_known(name) or self._is_far(name, now)):
                    sums = sums_of(now)
                    if sums is not None:
                        yield name, sums

    def _lasts(self, owner: str, key: Any) -> bool:
        """Whether a later step reads a value."""
        if (owner, key) not in self._lasting:
            self._lasting[owner, key] = reads_first(self._module, owner, key)
        return self._lasting[owner, key]

    def _is_known(self, name: Name) -> bool:
        carried: Carried = self._replicas.carried
        comes = self._replicas.comes_together(name) or sendable(name, self._module) in carried.ways
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
    """What tells that a value was written to in place."""
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
