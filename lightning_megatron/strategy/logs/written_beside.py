"""Writes of the last stage's step beside the attributes of the user's module, for the other stages.

A module between the layers counts its calls, the step counts in a dictionary of its Python module or draws from a
generator after the layers. The stages before the last do not get that far, and go on from what they have. Looking
everywhere takes reading the code, so it is done in the first step of each kind and now and then; what was seen to be
written there is followed in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.draws.given_again import State, set_state
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.pipeline.elsewhere.containers import MISSING, Address
from lightning_megatron.pipeline.elsewhere.undo import LISTS, Kept, has_graph, is_array, is_equal, refill, written_into
from lightning_megatron.pipeline.stage.order import CalledAgain
from lightning_megatron.strategy.loss.tables import NUMBERS, Name, Table, found_again
from lightning_megatron.strategy.loss.traces import Traces, as_it_is
from lightning_megatron.strategy.recheck import is_due

Place = tuple[Address, Any]
"""Of a table, and a key in it."""


class WrittenBeside:
    """Follows it: what was seen to be written, and keys that come to a dictionary in which a new one was.

    Args:
        module: the user's.
        layers: names of the trunk's layers, which tell of what they write themselves.
        follows: whether an attribute of the module is followed anyway.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str], follows: Callable[[Any], bool]) -> None:
        self._module, self._layers, self._follows = module, Parts(layers), follows
        self._runs: Counter[str] = Counter()
        self._places: dict[Name, tuple[Table, Any]] = {}
        self._before: dict[Place, Kept | None] = {}
        self._growing: dict[Address, Table] = {}
        self._lengths: dict[Address, int] = {}
        self._looked: Traces | None = None

    def snapshot(self) -> None:
        """Remember before a step what was seen to be written."""
        self._before = {}
        for table, key in self._places.values():
            values = found_again(self._module, table)
            if values is not None:
                self._before[table.address, key] = Kept(values, (key,))
        found = ((address, found_again(self._module, table)) for address, table in self._growing.items())
        self._lengths = {address: len(values) for address, values in found if values is not None}

    def looks(self, call: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
        """The user's step, looked at in some of its runs.

        Args:
            call: the user's step, taking a (micro-)batch.
            name: of it.
        """
        self._runs[name] += 1
        if not is_due(self._runs[name], first=2):
            return call

        def looked_at(batch: Any) -> Any:
            self._looked, traces = None, Traces(self._module, beside=True)
            try:
                output = call(batch)
            except CalledAgain:  # it will be started over
                self._runs[name] -= 1
                raise
            self._looked = traces
            with torch._C.DisableTorchFunction():  # a step that is watched must not read what other stages have
                self._note(traces)
            return output

        return looked_at

    def _note(self, traces: Traces) -> None:
        changes = traces.changes()
        found = [name for name in changes if self._is_beside(name, traces)]
        for name, (table, key) in zip(found, traces.tables(found), strict=True):
            if table.address and name not in self._places:
                self._places[name] = table, key
                self._before[table.address, key] = None
                if changes[name][0] is MISSING:
                    self._note_growing(table, key, changes[name][1])

    def _note_growing(self, table: Table, key: Any, value: Any) -> None:
        """Take note of a dictionary that a new key has come to, or that is new itself: each step may have a key."""
        entry = type(table.values) is dict
        if entry and table.address[-1][0] != "module":
            self._growing[table.address] = table
        if type(value) is dict:
            address = (*table.address, ("item" if entry else "attr", key))
            self._growing[address] = Table("", value, (), address)

    def changes(self) -> Iterator[tuple[Place, Any]]:
        """Writes since the snapshot, by backwards too."""
        looked, self._looked = self._looked, None
        if looked is not None:
            self._note(looked)
        for table, key in self._places.values():
            if (table.address, key) not in self._before:
                continue
            kept, values = self._before[table.address, key], found_again(self._module, table)
            now = MISSING if values is None else as_it_is(values.get(key, MISSING))
            if _travels(now) and (kept is None or not is_equal(kept.earlier(key), now)):
                yield (table.address, key), now
        for address, length in self._lengths.items():
            for key, value in _latest(found_again(self._module, self._growing[address]), length):
                now = as_it_is(value)
                if (address, key) not in self._before and _travels(now):
                    yield (address, key), now

    def _is_beside(self, name: Name, traces: Traces) -> bool:
        """Whether it is none of the attributes of the module that are followed anyway, no buffer, nor of layers."""
        owner, key = name
        if owner in self._layers or name in traces.buffers:
            return False
        first = owner.partition(".")[0] if owner else key
        return first not in self._module.__dict__ or not self._follows(self._module.__dict__[first])

    def set(self, place: Place, value: Any) -> None:
        """Write what :meth:`changes` gave on another stage."""
        address, key = place
        values = found_again(self._module, Table("", {}, (), address))
        if values is None:
            return
        now = values.get(key, MISSING)
        if isinstance(value, State):
            if now is not MISSING:
                set_state(now, value)
        elif isinstance(value, LISTS) and isinstance(now, LISTS):
            refill(now, value)
        else:
            values[key] = written_into(now, value)


def _latest(values: Any, length: int) -> list[tuple[Any, Any]]:
    """Entries that have come to a dictionary since it had so many, in order; none of anything else."""
    return [*islice(reversed(values.items()), max(len(values) - length, 0))][::-1] if type(values) is dict else []


def _travels(value: Any) -> bool:
    """Whether a value can be sent, and means the same on another stage."""
    if isinstance(value, (*LISTS, tuple)):
        return all(map(_travels, value)) and not has_graph(list(value))
    if isinstance(value, dict):
        return all(map(_travels, value.values())) and not has_graph(value)
    if is_array(value):
        return value.dtype.kind in "fiucb"
    return isinstance(value, (*NUMBERS, State, type(None))) or (isinstance(value, Tensor) and not value.requires_grad)
