"""Changes of a step to the module where it waits for another stage, which are taken back before its end.

Micro-batches of a step that calls the layers more than once run at once: one goes on while another waits. Each of them
is to find what it has left, and not what the others have::

    with policy.disable_adapter():        micro-batch 0      flags on, x ─▶ │ waits │ ─▶ reference, flags off
        reference = policy(x)             micro-batch 1                     │ flags off: y ─▶ ...

So a trial looks at the module wherever the step waits. Names that stand for another value there than at the start are
exchanged when micro-batches take turns. What cannot be exchanged (a list that is written into, a hook) is named, and
such batches run whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lightning_megatron.pipeline.elsewhere.containers import MISSING
from lightning_megatron.pipeline.repeated.with_gradients import TrainingFollower
from lightning_megatron.strategy.hooks.kept_hooks import HookTables
from lightning_megatron.strategy.loss.tables import Name, spelled
from lightning_megatron.strategy.loss.traces import Traces

Slot = tuple[MutableMapping[Any, Any], Any]
"""A table and a key in it."""


class Middle:
    """Around runs of a step in a trial.

    Args:
        module: the user's.
        traces: of it.
        follower: which says when the step waits.
        around: another context, around each run.

    Attributes:
        slots: that hold something else in the middle of the step.
        flags: parameters of which another flag says there whether they require gradients.
        fixed: name of something that is changed in place; or "".
    """

    def __init__(
        self,
        module: nn.Module,
        traces: Traces,
        follower: TrainingFollower,
        around: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._module, self._traces, self._follower, self._around = module, traces, follower, around
        self._tables = HookTables(module)
        self.slots: dict[tuple[int, Any], Slot] = {}
        self.flags: dict[str, nn.Parameter] = {}
        self.fixed = ""
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with torch._C.DisableTorchFunction():
            self._start = self._state()
            self._lent = {name: table[key] for name, (table, key) in self._traces.rebound().items()}
        self._stack = ExitStack()
        if self._around is not None:
            self._stack.enter_context(self._around)
        self._follower.waits = self.look
        self._stack.callback(setattr, self._follower, "waits", None)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def look(self) -> None:
        """The step waits for another stage."""
        with torch._C.DisableTorchFunction():
            moved = {
                name: (table, key)
                for name, (table, key) in self._traces.rebound().items()
                if name not in self._lent or self._lent[name] is not table[key]
            }
            for name, slot in moved.items():
                self.slots[id(slot[0]), name[1]] = slot
            written = [name for name in self._traces.changes() if name not in moved]
            fixed = [*written, *self._traces.refilled()]
            modes, flags, parts = self._state()
            for child, mode in modes.items():
                if self._start[0].get(child, mode) != mode:
                    self.slots[id(child.__dict__), "training"] = child.__dict__, "training"
            parameters = dict(self._module.named_parameters())
            self.flags |= {
                name: parameters[name] for name, flag in flags.items() if self._start[1].get(name, flag) != flag
            }
        if not self.fixed and fixed:
            self.fixed = f"`{spelled(fixed[0])}` is written into"
        if not self.fixed and self._traces.weights.found:
            self.fixed = f"`{spelled(min(self._traces.weights.found))}` is written"
        if not self.fixed and parts != self._start[2]:
            self.fixed = "modules, weights or hooks are exchanged"

    def refuses(self, lasting: Sequence[Name], *, draws: bool, gathers: bool) -> str:
        """Why micro-batches of the step cannot take turns; "" if they can.

        Args:
            lasting: names of what the step leaves written.
            draws: whether it draws random numbers, which are those of one process in one order only.
            gathers: whether it gathers over the replicas.
        """
        if self.fixed:
            return f"{self.fixed} between two calls of layers"
        if lasting:
            return f"the step writes `{spelled(lasting[0])}`"
        if draws:
            return "the step draws random numbers"
        return "the step gathers over the replicas" if gathers else ""

    def _state(self) -> tuple[dict[nn.Module, bool], dict[str, bool], list[tuple[int, ...]]]:
        """Modes of modules, flags of parameters, and what modules consist of."""
        modules = list(self._module.modules())
        tables = [table for child in modules for table in (child._modules, child._parameters)]
        parts = [tuple(id(value) for value in table.values()) for table in tables]
        hooks = [tuple(table) for table in self._tables.find()]
        flags = {name: parameter.requires_grad for name, parameter in self._module.named_parameters()}
        return {child: child.training for child in modules}, flags, [*parts, *hooks]


class Exchanged:
    """Values that micro-batches exchange when they take turns.

    Args:
        slots: tables and keys.
        flags: parameters whose flags are exchanged, by name.
    """

    def __init__(
        self,
        slots: Mapping[tuple[int, Any], Slot] = MappingProxyType({}),
        flags: Mapping[str, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        self._by_place, self._by_name = slots, flags
        self._slots, self._flags = list(slots.values()), list(flags.values())
        self._start: list[Any] = []

    def joined(self, middle: Middle) -> Exchanged:
        """These, and what a trial has found."""
        return Exchanged({**self._by_place, **middle.slots}, {**self._by_name, **middle.flags})

    def begin(self) -> None:
        """Take note of what there is at the start of a step."""
        self._start = self._now()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """In the middle of a micro-batch, around code of others."""
        mine = self._now()
        self._set(self._start)
        try:
            yield
        finally:
            self._set(mine)

    def _now(self) -> list[Any]:
        return [table.get(key, MISSING) for table, key in self._slots] + [each.requires_grad for each in self._flags]

    def _set(self, values: Sequence[Any]) -> None:
        for (table, key), value in zip(self._slots, values, strict=False):
            if value is MISSING:
                table.pop(key, None)
            elif table.get(key, MISSING) is not value:
                table[key] = value
        for parameter, flag in zip(self._flags, values[len(self._slots) :], strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
