"""What the steps of the parts of a batch write, against the step of all of it; and how it is written once per batch.

One process runs its step once per batch, and what the step reads of its own earlier writes is of earlier batches. So
each micro-batch finds what the first one found, and what they leave is put together behind the last of them::

    self.calls += 1                   the same for every part      as the last one leaves it
    self.right += (p == y).sum()      adds up                      what was there, and the sum of what each has added
    self.kept.append(loss)            an entry for each            what was there, and their mean
    self.kept.extend(rows)            as many as samples           what was there, and all of them
    self.ema = 0.9 * ema + 0.1 * x    none of these                the batch has to stay whole
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.batches import merge_outputs
from lightning_megatron.mesh.draws.given_again import Replayed, State, set_state
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.pipeline.elsewhere.containers import MISSING
from lightning_megatron.pipeline.elsewhere.undo import LISTS, Contents, is_equal, refill
from lightning_megatron.strategy.loss.tables import Name, Table, found_again, spelled
from lightning_megatron.strategy.loss.traces import Changes, as_it_is

Weights = Mapping[str, Sequence[Sequence[float]]]
"""Ways to weigh the parts of a join: "sizes" and "weights" -> weights of the parts, one or several."""


@dataclass
class Join:
    """What some neighbouring parts of a batch have written, and what these have at once.

    Attributes:
        parts: changes by each of them, from one and the same state.
        whole: changes by all of them.
        weights: by which their means may be weighed.
    """

    parts: Sequence[Changes]
    whole: Changes
    weights: Weights = field(default_factory=dict)


def judge(
    joins: Sequence[Join], layers: Sequence[str] = (), lasting: Collection[Name] = ()
) -> tuple[dict[Name, str], str, bool]:
    """How what the step writes comes of what its parts write.

    Args:
        joins: what was seen.
        layers: names of modules that may write what depends on their micro-batch.
        lasting: what even these may not: buffers, which are part of the module's state.

    Returns:
        Name -> "same", "sum", "each", "sizes", "weights" (an entry for each part, merged by these), "once" (by one of
        the parts); and the name of one value that has to be written by the whole batch, or "": one that layers write
        before any other.
    """
    kinds: dict[Name, list[str]] = {}
    starts: dict[Name, list[Any]] = {}
    for join in joins:
        for name in dict.fromkeys(name for found in (*join.parts, join.whole) for name in found):
            before = next(found[name] for found in (*join.parts, join.whole) if name in found)[0]
            *apart, together = (found[name][1] if name in found else before for found in (*join.parts, join.whole))
            kinds.setdefault(name, []).append(_kind_of(before, apart, together, join.weights))
            starts.setdefault(name, []).append(before)
    alike = {name: found[0] for name, found in kinds.items() if found[0] and len(set(found)) == 1}
    inside = Parts(layers)
    others = [name for name in kinds if name not in alike and (name in lasting or name[0] not in inside)]
    others.sort(key=lambda name: name[0] not in inside)
    unsure = any(kind not in ("same", "once") and all(map(_is_nothing, starts[name])) for name, kind in alike.items())
    return alike, spelled(others[0]) if others else "", unsure


def _is_nothing(value: Any) -> bool:
    """Whether a value is zero or empty."""
    return not value.any() if isinstance(value, Tensor) else not value or value is MISSING


def _kind_of(before: Any, apart: Sequence[Any], together: Any, weights: Weights) -> str:
    if all(is_equal(now, together) for now in apart):
        return "same"
    if isinstance(together, set):
        return "sum" if set().union(*apart) == together and all(before <= now for now in apart) else ""
    if isinstance(together, (list, deque)):
        return _kind_of_list(before, apart, together, weights)
    if before is MISSING:
        written = [now for now in apart if now is not MISSING]
        return "once" if len(written) == 1 and is_equal(written[0], together) else ""
    return "sum" if _adds_up(before, apart, together) else ""


def _kind_of_list(before: Any, apart: Sequence[Any], together: Any, weights: Weights) -> str:
    if all(len(now) == len(before) for now in (*apart, together)) and type(together) is list:
        adds = (_adds_up(row[0], row[1:-1], row[-1]) for row in zip(before, *apart, together, strict=True))
        return "sum" if all(adds) else ""
    tails = [_tail(before, now) for now in (*apart, together)]
    if any(tail is None for tail in tails):
        return ""
    *parts, whole = (tail or [] for tail in tails)
    if is_equal([entry for part in parts for entry in part], whole):
        return "each"
    if len(whole) != 1 or any(len(part) != 1 for part in parts):
        return ""
    entries = [part[0] for part in parts]
    for kind, ways in weights.items():
        if any(_alike(_merged(entries, way, ways[0]), whole[0]) for way in ways):
            return kind
    return ""


def _tail(before: Any, now: Any) -> list[Any] | None:
    """What was appended; ``None`` if anything else was done."""
    earlier, later, most = list(before), list(now), getattr(before, "maxlen", None) or 0
    for count in range(len(later) + 1):
        tail = later[len(later) - count :]
        if is_equal([*earlier, *tail][-most:], later):
            return tail
    return None


def _merged(entries: Sequence[Any], weights: Sequence[float], sizes: Sequence[float]) -> Any:
    try:
        with torch.no_grad():
            return merge_outputs(entries, weights, [int(size) for size in sizes], "training_step")
    except (ValueError, KeyError, TypeError):
        return MISSING


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are the same but for rounding."""
    if isinstance(one, (float, Tensor)) and isinstance(other, (float, Tensor)):
        left, right = (torch.as_tensor(value).detach().double() for value in (one, other))
        return left.shape == right.shape and bool(torch.allclose(left, right, rtol=1e-5, atol=1e-9, equal_nan=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(entry, other[key]) for key, entry in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return is_equal(one, other)


def _adds_up(before: Any, apart: Sequence[Any], together: Any) -> bool:
    """Whether the parts change a number by what the whole changes it, or append to a tensor what the whole appends."""
    if not all(isinstance(value, (int, float, Tensor)) for value in (before, together, *apart)):
        return False
    start, end = torch.as_tensor(before), torch.as_tensor(together)
    ends = [torch.as_tensor(value) for value in apart]
    if any(value.shape != start.shape for value in (end, *ends)):
        alike = all(value.ndim == start.ndim > 0 for value in (end, *ends))
        grown = sum(len(value) - len(start) for value in ends) if alike else -1
        return alike and len(end) - len(start) == grown and is_equal(end[: len(start)], start)
    change, changes = (end - start).double(), sum((value - start).double() for value in ends)
    return bool(torch.allclose(change, torch.as_tensor(changes), rtol=1e-5, atol=1e-12))


@dataclass
class _Slot:
    """A value that the step writes.

    Attributes:
        table: where it is.
        key: of it.
        kind: how the parts come together.
        turn: in which run of a micro-batch it is written, if by a layer; ``None`` for the last. A rank of several
            virtual stages runs the step once for each.
        values: the table, as it is in this batch; ``None`` where it is gone.
        start: the value, and a copy, as the batch found it.
        stand: what a micro-batch found in its place.
        left: what each micro-batch has made of it.
    """

    table: Table
    key: Any
    kind: str
    turn: int | None
    values: Any = None
    start: tuple[Any, Any] = (MISSING, None)
    stand: Any = MISSING
    left: list[Any] = field(default_factory=list)


class OncePerBatch:
    """Values that a step writes, of which each micro-batch finds what the first one found.

    Args:
        root: the user's module.
        slots: where they are: table, key, how the parts come together (see :func:`judge`), and in which run of a
            micro-batch they are written, if by a layer.
    """

    def __init__(self, root: nn.Module | None = None, slots: Sequence[tuple[Table, Any, str, int | None]] = ()) -> None:
        self._root, self._slots = root, [_Slot(*slot) for slot in slots]

    def __len__(self) -> int:
        return len(self._slots)

    def around(self) -> OnceAround:
        """The same, for a step whose layers run in micro-batches, and the code around them on the whole batch."""
        found = OnceAround(self._root)
        found._slots = self._slots
        return found

    def begin(self, weights: Sequence[float], sizes: Sequence[float]) -> None:
        """Remember them at the start of a batch.

        Args:
            weights: of its micro-batches in means.
            sizes: of its micro-batches, in samples.
        """
        self._weights, self._sizes = weights, sizes
        for slot in self._slots:
            slot.values = found_again(self._root, slot.table) if self._root is not None else None
            value = slot.values.get(slot.key, MISSING) if slot.values is not None else MISSING
            if isinstance(value, Replayed):
                value.forget()
            slot.start, slot.stand, slot.left = (value, Contents.of(value)), MISSING, []

    def put_back(self, turn: int) -> None:
        """Before a run: set what is written in it as it was.

        Args:
            turn: which run of a micro-batch it is.
        """
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
        """After a run: remember what a micro-batch has left, and put all together behind the last of them.

        Args:
            turn: which run of the micro-batch it was.
            last: whether it was its last.
        """
        for slot in self._slots:
            if slot.values is None or not (last if slot.turn is None else slot.turn == turn):
                continue
            now = slot.values.get(slot.key, MISSING)
            count = len(self._sizes)
            slot.left.append(as_it_is(now) if slot.kind != "same" or len(slot.left) + 1 == count else None)
            if len(slot.left) == count:
                alone = slot.kind == "same" or count == 1
                self._set(slot, slot.left[-1] if alone else self._together(slot), now)

    def _together(self, slot: _Slot) -> Any:
        before, left = _earlier(*slot.start), slot.left
        if slot.kind == "once":
            return next((value for value in reversed(left) if value is not MISSING), MISSING)
        if isinstance(before, set):
            return before.union(*left)
        if isinstance(before, (list, deque)):
            return self._list_of(slot, before)
        return _sum(before, left)

    def _list_of(self, slot: _Slot, before: Any) -> Any:
        tails = [_tail(before, now) for now in slot.left]
        if slot.kind == "sum" and all(len(now) == len(before) for now in slot.left):
            return [_sum(row[0], row[1:]) for row in zip(before, *slot.left, strict=True)]
        if any(tail is None for tail in tails):
            return slot.left[-1]
        entries = [entry for tail in tails for entry in tail or ()]
        if slot.kind in ("sizes", "weights") and len(entries) == len(self._sizes):
            weights = self._sizes if slot.kind == "sizes" else self._weights
            merged = _merged(entries, weights, self._sizes)
            entries = entries if merged is MISSING else [merged]
        return type(before)([*before, *entries], *([before.maxlen] if isinstance(before, deque) else []))

    def _set(self, slot: _Slot, value: Any, now: Any) -> None:
        """Let a slot hold a value; a tensor that was written to stays the one that it was."""
        original = slot.start[0]
        if value is MISSING:
            slot.values.pop(slot.key, None)
        elif isinstance(value, State):
            set_state(original, value)
        elif isinstance(value, LISTS):
            holder = now if isinstance(now, LISTS) else original
            refill(holder, value)
            slot.values[slot.key] = holder
        elif isinstance(original, Tensor) and now is slot.stand and isinstance(value, Tensor):
            if original.shape == value.shape:
                with torch.no_grad():
                    original.copy_(value)
            slot.values[slot.key] = original if original.shape == value.shape else value
        elif isinstance(value, (int, float, complex, str, tuple, dict, Tensor, type(None))):
            slot.values[slot.key] = value


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


def _earlier(value: Any, inside: Contents | None) -> Any:
    return value if inside is None else inside.copy


def _sum(before: Any, left: Sequence[Any]) -> Any:
    """``before``, and what each has added to it."""
    if isinstance(before, Tensor) and any(now.shape != before.shape for now in left):
        return torch.cat([before, *(now[len(before) :] for now in left)])
    total = before
    for now in left:
        total = total + (now - before)
    return total
