"""Values that a step writes, written once per batch by all of its micro-batches.

How what they leave comes together was found out by a trial, see :mod:`.written`. What no trial has seen is watched for:
what is the same for all of a batch is put back between them from then on, anything else is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.autograd import version_of
from lightning_megatron.mesh.draws.given_again import Replayed, State, set_state
from lightning_megatron.mesh.messages.late import LateAnswer
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.pipeline.elsewhere.away import source_of
from lightning_megatron.pipeline.elsewhere.containers import MISSING
from lightning_megatron.pipeline.elsewhere.undo import (
    LISTS,
    Contents,
    has_graph,
    is_kind_of_array,
    refill,
    written_into,
)
from lightning_megatron.strategy.carried.joined_entries import entry_of_all, value_anew
from lightning_megatron.strategy.hooks.kept_hooks import HookTables, KeptHooks
from lightning_megatron.strategy.loss.said import refused_write
from lightning_megatron.strategy.loss.tables import (
    NOT_USERS,
    NUMBERS,
    PerClass,
    Table,
    appended_names,
    found_again,
    spelled,
)
from lightning_megatron.strategy.loss.traces import as_it_is, is_as_marked, mark_of
from lightning_megatron.strategy.loss.written import LOSS, are_unlike, is_anew, kind_of_new, sum_of_all, tail_of

_NEW = "new"

_ARRAYS: PerClass[bool] = PerClass(is_kind_of_array)
_WATCHED: PerClass[bool] = PerClass(lambda kind: issubclass(kind, (*NUMBERS, Tensor)) or kind is list or _ARRAYS[kind])
_MARKED: PerClass[bool] = PerClass(lambda kind: issubclass(kind, (Tensor, list)) or _ARRAYS[kind])


@dataclass
class _Slot:
    """A value that the step writes.

    Attributes:
        table: where it is.
        key: of it.
        kind: how the parts come together, see :data:`.Kinds`.
        turn: in which run of a micro-batch it is written, if in one alone; ``None`` for the last. A rank of several
            virtual stages runs the step once for each: a layer in one of them, a part before the layers in the first.
        values: the table, as it is in this batch; ``None`` where it is gone.
        start: the value, and a copy, as the batch found it.
        stand: what a micro-batch found in its place.
        left: what each micro-batch has made of it.
        missed: how many of them have not written it.
    """

    table: Table
    key: Any
    kind: Any
    turn: int | None
    values: Any = None
    start: tuple[Any, Any] = (MISSING, None)
    stand: Any = MISSING
    left: list[Any] = field(default_factory=list)
    missed: int = 0


class OncePerBatch:
    """Values that a step writes, of which each micro-batch finds what the first one found.

    Args:
        root: the user's module.
        slots: where they are: table, key, how the parts come together (see :func:`.judge`), and in which run of a
            micro-batch they are written, if by a layer or a part that runs in one alone.
        tables: in which nothing else is written, as far as is known.
        step: name of the user's step.
        may_run_again: whether a batch that writes something else can be taken back, and run whole.

    Attributes:
        unforeseen: name of something else that the latest batch has written, where it can; or "".
    """

    def __init__(
        self,
        root: nn.Module | None = None,
        slots: Sequence[tuple[Table, Any, Any, int | None]] = (),
        tables: Sequence[Table] = (),
        step: str = "training_step",
        *,
        may_run_again: bool = False,
    ) -> None:
        self._step, self._may_run_again, self.unforeseen = step, may_run_again, ""
        self._root, self._slots, self._tables = root, [_Slot(*slot) for slot in slots], tables
        self._watched: list[tuple[Any, Any, Any, Any]] = []
        self._keys: list[tuple[Any, set[Any]]] = []
        self._runs = 0
        self._hooks: KeptHooks | None = None
        self._unlike: list[tuple[str, Any, LateAnswer]] = []

    @property
    def is_known(self) -> bool:
        """Whether a trial has found out what the step writes."""
        return self._root is not None

    def around(self, once: Parts) -> OnceAround:
        """The same for layers in micro-batches, and code around them on the batch; of parts in ``once`` all stays."""
        found = OnceAround(self._root)
        found._slots = [slot for slot in self._slots if slot.table.name not in once]
        return found

    def begin(self, parts: Sequence[Any], weights: Sequence[float], sizes: Sequence[float]) -> None:
        """Remember them at the start of a batch.

        Args:
            parts: its micro-batches.
            weights: of their losses.
            sizes: samples of each.
        """
        for name, key, unlike in self._unlike:
            if unlike:
                self._refuse(name, key, known=True)
        self._unlike.clear()
        self._sizes, self._runs, self.unforeseen = sizes, 0, ""
        self._weights: dict[Any, Sequence[float]] = {"sizes": self._sizes, LOSS: weights}
        for way in {
            each for slot in self._slots if callable(each := slot.kind[1] if is_anew(slot.kind) else slot.kind)
        }:
            self._weights[way] = [way(part) for part in parts]
        self._hooks = KeptHooks(HookTables(self._root), lost=False) if self._root is not None and self._slots else None
        for slot in self._slots:
            slot.values = found_again(self._root, slot.table) if self._root is not None else None
            value = slot.values.get(slot.key, MISSING) if slot.values is not None else MISSING
            if isinstance(value, Replayed):
                value.forget()
            slot.start, slot.stand, slot.left, slot.missed = (value, Contents.of(value)), MISSING, [], 0
        written = {(id(slot.values), slot.key) for slot in self._slots}
        lists = {id(slot.start[0]) for slot in self._slots if slot.key is None}
        self._watched = [
            (table.values, key, value, mark_of(value) if _MARKED[value.__class__] else None)
            for table in (self._tables if len(parts) > 1 else ())
            for key, value in table.values.items()
            if _WATCHED[value.__class__]
            and (not written or (id(table.values), key) not in written)
            and (not lists or id(value) not in lists)
            and key not in NOT_USERS
        ]
        self._keys = [(table.values, set(table.values)) for table in (self._tables if len(parts) > 1 else ())]

    def put_back(self, turn: int) -> None:
        """Before a run: set what is written in it as it was.

        Args:
            turn: which run of a micro-batch it is.
        """
        if self._hooks is not None:
            self._hooks.put_back()
        for slot in self._slots:
            if slot.values is not None and slot.turn in (turn, None):
                self._start_over(slot)

    def _start_over(self, slot: _Slot) -> None:
        value, inside = slot.start
        if value is MISSING:
            slot.values.pop(slot.key, None)
        elif isinstance(value, Tensor) and inside is not None:
            slot.stand = inside.copy.clone()  # a graph of an earlier micro-batch may hold the one before
            slot.values[slot.key] = slot.stand
        else:
            if slot.values.get(slot.key, MISSING) is not value:
                slot.values[slot.key] = value
            if inside is not None:
                inside.put_back()

    def note(self, turn: int, *, last: bool) -> None:
        """After a run: remember what a micro-batch has left, and put all together after the last of them.

        Args:
            turn: which run of the micro-batch it was.
            last: whether it was its last.
        """
        count, done = len(self._sizes), []
        if last:
            self._runs += 1
            self._find_new(count)
        for slot in self._slots:
            if slot.values is None or not (last if slot.turn is None else slot.turn == turn):
                continue
            now = slot.values.get(slot.key, MISSING)
            slot.missed += now is MISSING or (now is slot.stand and not version_of(now))
            copied = slot.kind != "same" or len(slot.left) + 1 == count or _ARRAYS[now.__class__]
            slot.left.append(as_it_is(now) if copied else now)
            if len(slot.left) == count:
                alone = slot.kind == "same" or count == 1
                if slot.kind == "same" and slot.turn is None:
                    self._check_alike(slot)
                done.append((slot, slot.left[-1] if alone else self._together(slot), now))
        for slot, value, now in done:
            self._set(slot, value, now)

    def _check_alike(self, slot: _Slot) -> None:
        """Complain of what the micro-batches that were tried have left the same, and those of this batch have not: a
        number that grows where any sample meets a condition.
        """
        unlike = are_unlike(slot.left)
        if isinstance(unlike, Tensor) and unlike.device.type != "cpu" and not self._may_run_again:
            self._unlike.append((slot.table.name, slot.key, LateAnswer(unlike)))
        elif unlike:
            self._refuse(slot.table.name, slot.key, known=True)

    def _find_new(self, count: int) -> None:
        """Notice what is written for the first time: between micro-batches it is put back from now on.

        Raises:
            RuntimeError: in place and by a later micro-batch than the first; what it was before is not known any more.
        """
        known = len(self._slots)
        for values, key, value, inside in [*self._watched, *self._new_keys()] if count > 1 else ():
            now = values[key] if key in values else MISSING  # noqa: SIM401  # a call less for each, in every micro-batch
            if now is value and (inside is None or is_as_marked(now, inside)):
                continue
            passing = isinstance(now, list) and key not in appended_names(type(self._root)) and has_graph(now)
            if passing or source_of((value, now)) is not None:
                continue  # it is read in the step, or another stage judges it
            name = next((table.name for table in self._tables if table.values is values), "")
            if now is value and isinstance(now, Tensor) and self._runs > 1:
                self._refuse(name, key)
            slot = _Slot(Table(name, values, (key,), ()), key, _NEW, None, values)
            counted = inside is None or isinstance(inside, int)
            old = inside if not counted else value[:inside] if isinstance(value, list) else value
            slot.start = value, Contents(value, old) if old is not value else None
            slot.left = [old] * (self._runs - 1)
            self._slots.append(slot)
        if len(self._slots) > known:
            self._watched = [entry for entry in self._watched if not self._has(entry[0], entry[1])]

    def _new_keys(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Of attributes and of entries of dictionaries that were not there at the start of the batch."""
        for values, keys in self._keys:
            for key in () if values.keys() <= keys else values.keys() - keys:
                kept = _WATCHED[values[key].__class__] and key not in NOT_USERS and not has_graph(values[key])
                if kept and not self._has(values, key):
                    yield values, key, MISSING, None

    def _refuse(self, name: str, key: Any, *, known: bool = False) -> None:
        if not self._may_run_again:
            raise RuntimeError(refused_write(self._step, spelled((name, key)), known=known))
        self.unforeseen = spelled((name, key))

    def _has(self, values: Any, key: Any) -> bool:
        return any(slot.values is values and slot.key == key for slot in self._slots)

    def _together(self, slot: _Slot) -> Any:
        (value, inside), left = slot.start, slot.left
        before = value if inside is None else inside.copy
        if is_anew(slot.kind):
            return self._set_anew(slot)
        if slot.kind == _NEW:
            slot.kind = kind_of_new(before, left)
            if not slot.kind:
                self._refuse(slot.table.name, slot.key)
                slot.kind = "same"
            if slot.kind == "same":
                return left[-1]
        if before is MISSING and any(isinstance(now, LISTS) for now in left):
            before = type(next(now for now in left if isinstance(now, LISTS)))()
            slot.left = left = [before if now is MISSING else now for now in left]
        if slot.kind == "once":
            return next((value for value in reversed(left) if value is not MISSING), MISSING)
        if isinstance(before, set):
            return before.union(*left)
        if isinstance(before, (list, deque)):
            return self._list_of(slot, before)
        return sum_of_all(before, left)

    def _set_anew(self, slot: _Slot) -> Any:
        """Value that the batch sets, of those that its micro-batches have set."""
        if slot.missed == len(slot.left):
            return slot.left[-1]
        way, some = slot.kind[1], slot.missed > 0
        whole = MISSING if some else value_anew(slot.left, way, self._weights.get(way, self._sizes))
        if whole is MISSING:
            self._refuse(slot.table.name, slot.key, known=True)
        return slot.left[-1] if whole is MISSING else whole

    def _list_of(self, slot: _Slot, before: Any) -> Any:
        tails = [tail_of(before, now) for now in slot.left]
        if slot.kind == "sum" and all(len(now) == len(before) for now in slot.left):
            return [sum_of_all(row[0], row[1:]) for row in zip(before, *slot.left, strict=True)]
        if any(tail is None for tail in tails):
            if self._may_run_again:
                self._refuse(slot.table.name, slot.key)
            return slot.left[-1]
        entries = [entry for tail in tails for entry in tail or ()]
        if entries and all(len(tail or ()) <= 1 for tail in tails):
            some = [place for place, tail in enumerate(tails) if tail]
            weights = [self._weights.get(slot.kind, self._sizes)[place] for place in some]
            whole = entry_of_all(entries, slot.kind, weights, [self._sizes[place] for place in some])
            entries = entries if whole is MISSING else [whole]
        return type(before)([*before, *entries], *([before.maxlen] if isinstance(before, deque) else []))

    def _set(self, slot: _Slot, value: Any, now: Any) -> None:
        """Let a slot hold a value; a tensor that was written to stays the one that it was."""
        original = slot.start[0]
        if value is MISSING:
            slot.values.pop(slot.key, None)
        elif isinstance(value, State):
            set_state(original, value)
        elif isinstance(value, LISTS):
            holder = now if isinstance(now, LISTS) else original if isinstance(original, LISTS) else type(value)()
            refill(holder, value)
            slot.values[slot.key] = holder
        elif isinstance(original, Tensor) and now is slot.stand and isinstance(value, Tensor):
            if original.shape == value.shape:
                with torch.no_grad():
                    original.copy_(value)
            slot.values[slot.key] = original if original.shape == value.shape else value
        elif isinstance(value, (int, float, complex, str, tuple, dict, Tensor, type(None))) or _ARRAYS[value.__class__]:
            slot.values[slot.key] = written_into(original, value) if now is original else value


class OnceAround(OncePerBatch):
    """Of a step whose layers run in micro-batches, and the code around them on the whole batch, which writes once."""

    @contextmanager
    def layers(self, turn: int, alike: list[tuple[_Slot, Any]]) -> Iterator[None]:
        """Around a run for the layers of a micro-batch: of what the code around them writes it leaves what is the same
        for all of a batch, which code between layers may be the only one to write.

        Args:
            turn: which run of the micro-batch it is.
            alike: takes what is the same for all, as it is after the run; for :meth:`set_again`.
        """
        slots = [slot for slot in self._slots if slot.values is not None and slot.turn is None]
        others = [(slot, slot.values.get(slot.key, MISSING)) for slot in slots if slot.kind != "same"]
        copies = [Contents.of(value) for _, value in others]
        for slot, value in others:
            if isinstance(value, Tensor):
                slot.values[slot.key] = value.clone()
        self.put_back(turn, whole=False)
        try:
            yield
        finally:
            self.note(turn, last=False)
            alike += self._alike()
            for (slot, value), inside in zip(others, copies, strict=True):
                if value is MISSING:
                    slot.values.pop(slot.key, None)
                else:
                    slot.values[slot.key] = value
                if inside is not None:
                    inside.put_back()

    def put_back(self, turn: int, *, whole: bool = True) -> None:
        """Before a run: set what is written in it as it was, if it is the same for all or written by a layer."""
        for slot in self._slots:
            mine = slot.kind == "same" if slot.turn is None else slot.turn == turn and not whole
            if slot.values is not None and mine:
                self._start_over(slot)
        if self._hooks is not None:
            self._hooks.put_back()

    def settle(self) -> None:
        """After a run of the code around the layers: what it has written stays."""
        self.set_again(self._alike())

    def _alike(self) -> list[tuple[_Slot, Any]]:
        slots = [slot for slot in self._slots if slot.kind == "same" and slot.turn is None and slot.values is not None]
        return [(slot, as_it_is(slot.values.get(slot.key, MISSING))) for slot in slots]

    def set_again(self, alike: Sequence[tuple[_Slot, Any]]) -> None:
        """Set what a run has left that is the same for all, after it was undone."""
        for slot, value in alike:
            self._set(slot, value, slot.values.get(slot.key, MISSING))
