"""Facts about the values that steps carry to the next step and write from the samples of their replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.names import leaf_of
from lightning_megatron.pipeline.elsewhere.containers import MISSING
from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step
from lightning_megatron.strategy.carried.step_stores import (
    defaults_of,
    is_plainly_written,
    is_stored,
    names_of_clocks,
    stored_behind_counts,
    stored_names,
)
from lightning_megatron.strategy.carried.ways_on import ways_on
from lightning_megatron.strategy.loss.replicas_said import say_written_by_all
from lightning_megatron.strategy.loss.tables import Name, is_of_scheduler, names_of_rates, sendable
from lightning_megatron.strategy.loss.trials.pieces_tried import Tried
from lightning_megatron.strategy.loss.written import Kinds, common_kinds

_APART: Kinds = ("",)
_UNSEEN: Kinds = ("unseen",)


class Carried:
    """The values of a run.

    Args:
        module: the user's.
        mesh: the grid.

    Attributes:
        ways: name -> how what the replicas have written comes together in each step; "" where that is not certain.
        seen: names of what trials have seen to be written.
        rows: names of what has a row for each sample, as trials have seen.
        passed: names of what a pass on the samples of all replicas writes in this step.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh) -> None:
        self._module, self._world, self._replicas = module, mesh.group("world"), mesh.layout.data
        self._functions: list[Any] | None = None
        self.seen, self.rows, self._said = set[Name](), set[Name](), list[Name]()
        self._here: dict[Name, Kinds] = {}
        self._known: dict[Name, Kinds] = {}
        self.ways: dict[Name, Any] = {}
        self.passed = frozenset[Name]()

    def judge(
        self,
        tried: Tried,
        named: Mapping[Name, Sequence[Name]],
        unlike: Iterable[Name],
        kinds: Mapping[Name, Kinds],
        others: Callable[[Name], bool],
    ) -> list[Name]:
        """Look at a trial of a step that does not gather over the replicas itself; for :meth:`learn`.

        Args:
            tried: it.
            named: values that it has written and later steps read, by the names under which all ranks know them.
            unlike: those that replicas have written otherwise although all parts of a batch write the same.
            kinds: how values of a batch come of those of its parts.
            others: whether a value that no trial has seen would come together after the last batch.

        Returns:
            Those that each replica writes from its own samples.
        """
        mixed = (said for said, names in named.items() if any(kinds.get(name) != ("same",) for name in names))
        clocks = self.clocks
        modules = dict(self._module.named_modules())
        norms = {name for name, child in modules.items() if isinstance(child, _BatchNorm)}
        found = [said for said in dict.fromkeys([*unlike, *mixed]) if said[1] not in clocks]
        joins = tried.joins()
        for said in (said for said in found if said[0] not in norms):
            apart = said[1] is not None and said[0] not in modules  # others may come, which no trial has seen
            word = leaf_of(said[0]) if said[1] is None else said[1]
            apart = apart or not is_plainly_written(self.called, str(word))
            ways = {() if apart else ways_on(joins, name, kinds.get(name, ())) for name in named.get(said, ())}
            self._here[said] = (ways.pop() or _APART) if len(ways) == 1 else _APART
        if any(map(is_of_scheduler, found)):  # sooner or later a scheduler writes all
            self._here.update((name, _APART) for name in sorted(names_of_rates(self._module)))
        changes = [change for join in joins for each in (*join.parts, join.whole) for change in each.items()]
        new = {name: now for name, (was, now) in changes if was is MISSING and kinds.get(name) == ("same",)}
        self.seen.update(name for name, _ in changes if name not in new)  # the others may be as their class has them
        unseen = (name for name in self._unseen(tried, new) if not others(name))
        for name in (name for name in unseen if name[0] not in norms and name[1] not in clocks):
            self._here.setdefault(sendable(name, self._module), _UNSEEN)
        return found

    def learn(self, usual: Any) -> None:
        """Take note of what all ranks have seen, and say what needs a pass; collective over the world.

        Args:
            usual: the way to weigh of the loss, which goes before the others.
        """
        here, self._here = self._here, {}
        rows = {sendable(name, self._module) for name in self.rows}
        gathered = objects.gather((here, rows) if here or rows else None, self._world)
        by_sample = {name for _, names in filter(None, gathered) for name in names}
        told = [
            {name: ways for name, ways in each[0].items() if ways != _UNSEEN or name not in by_sample} if each else {}
            for each in gathered
        ]
        seen = [{name: ways for name, ways in each.items() if ways != _UNSEEN} for each in told]
        for name, ways in common_kinds(seen).items():
            self._known[name] = tuple(way for way in self._known.get(name, ways) if way in ways) or _APART
        self.ways = {name: usual if usual in ways else ways[0] for name, ways in self._known.items()}
        self.ways = {**{name: "" for each in told for name in each}, **self.ways}
        apart = [name for name, way in self.ways.items() if not way]
        if not set(apart) <= set(self._said):
            say_written_by_all(apart, self._replicas)
        self._said = apart

    def _unseen(self, tried: Tried, new: Mapping[Name, Any]) -> set[Name]:
        """Values that the code stores whatever the batch, or for many samples, and that no trial has seen change."""
        counted = stored_behind_counts(self.called)
        stored = stored_names(self.called) | counted
        values = (*tried.traces.values(), *new.items(), *defaults_of(self._module, counted).items())
        names = {name for name, value in values if is_stored(name, value, stored)} - self.seen
        return names and tried.traces.lasting(names) & names

    @property
    def called(self) -> list[Any]:
        """The functions that the step calls."""
        if self._functions is None:
            self._functions = functions_of_step(self._module)
        return self._functions

    @property
    def clocks(self) -> set[str]:
        """Names of what the step reads off a clock."""
        return names_of_clocks(self.called)
