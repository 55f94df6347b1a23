"""Compares what the steps of the parts of a batch write with what the step of the whole writes.

One process runs its step once per batch, and what the step reads of its own earlier writes is of earlier batches. So
each micro-batch finds what the first one found, and what they leave is put together after the last of them
(:mod:`.once`)::

    self.calls += 1                   the same for every part      as the last one leaves it
    self.right += (p == y).sum()      adds up                      what was there, and the sum of what each has added
    self.bank[indices] = rows         other elements each          the batch has to stay whole: one may come twice in it
    if hard.any(): self.hits += 1     by one of them alone         the same, until two of them show whether it adds up
    self.kept.append(loss)            an entry for each            what was there, and their mean, or their sum
    self.kept.extend(rows)            as many as samples           what was there, and all of them
    if m.any(): self.kept.append(e[m])  an entry of some of them   what was there, and the rows of all in one entry
    self.ema = 0.9 * ema + 0.1 * x    none of these                the batch has to stay whole

What layers of the trunk keep matters where a hook behind the step reads it (``layer.map = scores``, then
``self.log("entropy", entropy_of(layer.map))``): the rows of all micro-batches, their mean, or their sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.pipeline.elsewhere.containers import MISSING
from lightning_megatron.pipeline.elsewhere.undo import LISTS, is_array, is_equal
from lightning_megatron.strategy.carried.joined_entries import merged, stacked, total, value_anew
from lightning_megatron.strategy.logs.combining import Narrowed
from lightning_megatron.strategy.loss.tables import NUMBERS, Name, Table, spelled
from lightning_megatron.strategy.loss.traces import Changes

Weights = Mapping[Any, Sequence[float]]
"""Ways to weigh the parts of a join: "sizes" (samples), or what counts their targets -> weight of each part."""
LOSS = "loss"
"""A mean, weighed as the losses."""
_ADDED = frozenset({"sum", "each"})
_SMALL = 1024  # elements of a tensor that is compared in every batch
Kinds = tuple[Any, ...]
"""Ways in which what the parts leave may come together: "same", "sum", "each" (entries of a list, one after the
other), "stacked" (one entry with the rows of those of the parts), "total" (of one entry of a list each), "once" (of
one of the parts), "set" (elements, other ones by each); or a mean, by its way to weigh. The first is the usual one.
Of what layers set and hooks read there are ``("anew", way)``: "stacked", "total", or a mean."""


@dataclass
class Join:
    """Writes of some neighbouring parts of a batch, and of the same at once.

    Attributes:
        parts: changes by each of them, from one and the same state.
        whole: changes by all of them.
        weights: by which their means may be weighed; "sizes" is one of them.
        assigned: tensors, lists and numbers in dictionaries that were set, whatever they were before.
    """

    parts: Sequence[Changes]
    whole: Changes
    weights: Weights = field(default_factory=dict)
    assigned: Collection[Name] = ()


class Verdict(NamedTuple):
    """How what a step writes comes of what the steps of the parts write.

    Attributes:
        kinds: name of a value -> how.
        whole: name of one that has to be written by the whole batch, or ""; one that layers write before any other.
        unsure: whether later batches may show another way.
        alone: names of those that add up, but of which no two parts have changed the same.
    """

    kinds: dict[Name, Kinds]
    whole: str
    unsure: bool
    alone: frozenset[Name]


def judge(
    joins: Sequence[Join],
    layers: Sequence[str] = (),
    lasting: Collection[Name] = (),
    read: Collection[Name] = (),
    *,
    cut: bool = True,
) -> Verdict:
    """How what the step writes comes of what its parts write.

    Args:
        joins: what was seen.
        layers: names of modules that may write what depends on their micro-batch.
        lasting: what even these may not: buffers, and what their next call reads.
        read: what hooks behind the step read, which have to find there what the whole batch leaves.
        cut: whether the parts are micro-batches, of which two may assign to one element in a later batch.
    """
    kinds: dict[Name, list[Kinds]] = {}
    starts: dict[Name, list[Any]] = {}
    met: set[Name] = set()
    inside = Parts(layers)
    for join in joins:
        for name in dict.fromkeys(name for found in (*join.parts, join.whole) for name in found):
            before = next(found[name] for found in (*join.parts, join.whole) if name in found)[0]
            *apart, together = (found[name][1] if name in found else before for found in (*join.parts, join.whole))
            ways = _kinds_of(before, apart, together, join.weights)
            if not ways and name in read and name not in lasting and name[0] in inside:
                ways = _kinds_anew(apart, together, join.weights)
            if meet(before, apart) or isinstance(together, set):
                met.add(name)
            elif ways == ("sum",) and name in join.assigned:
                ways = ("set",)
            kinds.setdefault(name, []).append(ways)
            starts.setdefault(name, []).append(before)
    common = {
        name: tuple(kind for kind in found[0] if all(kind in each for each in found)) for name, found in kinds.items()
    }
    alike = {name: found for name, found in common.items() if found}
    known = {name for name, ways in alike.items() if not (cut and "set" in ways)}
    matter = [name for name in kinds if name in lasting or name in read or name[0] not in inside]
    others = sorted((name for name in matter if name not in known), key=lambda name: name[0] not in inside)
    alone = frozenset(name for name in matter if name not in met and alike.get(name, ("",))[0] in _ADDED)
    plain = {name for name, (kind, *_) in alike.items() if kind not in ("same", "once")}
    unsure = any(all(_is_nothing(start) for start in starts[name]) for name in plain)
    return Verdict(alike, spelled(others[0]) if others else "", unsure, alone)


def _is_nothing(value: Any) -> bool:
    """Whether a value is zero or empty."""
    return not value.any() if isinstance(value, Tensor) or is_array(value) else not value or value is MISSING


def meet(before: Any, apart: Sequence[Any]) -> bool:
    """Whether several parts change one number, or one element of a list or tensor, or let it grow."""
    if isinstance(before, Tensor) and all(isinstance(now, Tensor) and now.shape == before.shape for now in apart):
        return bool((sum((now != before).int() for now in apart) > 1).any())
    if isinstance(before, list) and all(isinstance(now, list) and len(now) == len(before) for now in apart):
        return any(meet(row[0], row[1:]) for row in zip(before, *apart, strict=True))
    return sum(not is_equal(now, before) for now in apart) > 1


def _kinds_of(before: Any, apart: Sequence[Any], together: Any, weights: Weights) -> Kinds:
    if all(is_equal(now, together) for now in apart):
        none = isinstance(together, (list, deque)) and _adds_no_rows(before, together)
        return ("stacked", "same") if none else ("same",)
    if before is MISSING and isinstance(together, LISTS):
        before = type(together)()
        apart = [before if now is MISSING else now for now in apart]
    if isinstance(together, LISTS) and not all(isinstance(value, LISTS) for value in (before, *apart)):
        return ()  # nothing was there, or a number, and it could not be put together again
    if isinstance(together, set):
        return ("sum",) if set().union(*apart) == together and all(before <= now for now in apart) else ()
    if isinstance(together, (list, deque)):
        return _kinds_of_list(before, apart, together, weights)
    if before is MISSING:
        written = [now for now in apart if now is not MISSING]
        return ("once",) if len(written) == 1 and is_equal(written[0], together) else ()
    return ("sum",) if _adds_up(before, apart, together) else ()


def _kinds_of_list(before: Any, apart: Sequence[Any], together: Any, weights: Weights) -> Kinds:
    if all(len(now) == len(before) for now in (*apart, together)) and type(together) is list:
        rows = (row for row in zip(before, *apart, together, strict=True) if any(each is not row[0] for each in row))
        adds = (_adds_up(row[0], row[1:-1], row[-1]) for row in rows)
        return ("sum",) if all(adds) else ()
    tails = [tail_of(before, now) for now in (*apart, together)]
    if any(tail is None for tail in tails):
        return ()
    *parts, whole = (tail or [] for tail in tails)
    some = [place for place, part in enumerate(parts) if part]
    if _alike([entry for part in parts for entry in part], whole):
        return ("each",) if len(whole) != 1 else ("each", "stacked", *weights, "total")  # all the same of one entry
    if len(whole) != 1 or not some or any(len(part) > 1 for part in parts):
        return ()
    entries = [parts[place][0] for place in some]
    if _alike(stacked(entries), whole[0]):
        return ("stacked",)
    if _are_uneven(entries):
        return ()  # others of one shape would be taken for numbers of which there is a mean
    counts = {way: [each[place] for place in some] for way, each in weights.items()}
    means = tuple(way for way, each in counts.items() if _alike(merged(entries, each, counts["sizes"]), whole[0]))
    return means or (("total",) if _alike(total(entries), whole[0]) else ())


def _kinds_anew(apart: Sequence[Any], together: Any, weights: Weights) -> Kinds:
    """How a value comes of those of the parts that each sets anew: an attention map, the norm of activations."""
    ways: Mapping[Any, Sequence[float]] = {"stacked": (), **weights, "total": ()}
    fits = [way for way, each in ways.items() if _alike(value_anew(apart, way, each), together)]
    return tuple(("anew", way) for way in (fits[:1] if fits[:1] == ["stacked"] else fits))


def without_anew(kinds: Mapping[Name, Kinds]) -> dict[Name, Kinds]:
    """Those of values that go on from what was there, and are not set anew by each part."""
    return {name: ways for name, ways in kinds.items() if not is_anew(ways[0])}


def is_anew(kind: Any) -> bool:
    """Whether a way to come together is one of values that each part sets anew."""
    return isinstance(kind, tuple) and kind[:1] == ("anew",)


def _adds_no_rows(before: Any, now: Any) -> bool:
    """Whether an entry has been appended that has tensors without rows, of samples that meet a condition, say."""
    tail = tail_of(before if isinstance(before, LISTS) else [], now)
    leaves = [leaf for leaf in tree_leaves(tail) if isinstance(leaf, Tensor)] if tail and len(tail) == 1 else []
    return any(leaf.ndim and not len(leaf) for leaf in leaves)


def _are_uneven(entries: Sequence[Any]) -> bool:
    """Whether tensors in the same place of several entries have unlike numbers of rows."""
    each = [[leaf.shape for leaf in tree_leaves(entry) if isinstance(leaf, Tensor)] for entry in entries]
    return any(shapes != each[0] for shapes in each)


class Written:
    """Values that a step writes, as far as trials have seen it.

    Attributes:
        slots: name -> where it is, how it comes together, and in which run of a micro-batch it is written, if by a
            layer.
    """

    def __init__(self) -> None:
        self._ways = Narrowed()
        self._open, self._met = set[Name](), set[Name]()
        self.slots: dict[Name, tuple[Table, Any, Any, int | None]] = {}

    def note(self, verdict: Verdict) -> str:
        """Take note of what parts have changed alone, in a trial of micro-batches.

        Returns:
            Name of a value of code around the layers that comes together in none of the ways that earlier trials have
            allowed; or "". One that was not there before may do so, as it was not added to.
        """
        self._met |= verdict.kinds.keys() - verdict.alone
        self._open = (self._open | verdict.alone) - self._met
        for name, ways in verdict.kinds.items():
            left = self._ways.left.get(name, ways)
            around = name in self.slots and self.slots[name][-1] is None
            if around and ways != ("once",) != left and not set(left).intersection(ways):
                return spelled(name)
        return ""

    @property
    def undecided(self) -> str:
        """Name of a value that adds up, or is changed once where any part meets a condition: which, does not show; or
        "".
        """
        return min(map(spelled, self._open), default="")

    def learn(self, name: Name, kinds: Kinds, place: tuple[Table, Any], turn: int | None, usual: Any = None) -> None:
        """Take note of what a trial has seen.

        Args:
            name: of a value.
            kinds: how it may come together.
            place: its table and key.
            turn: see :attr:`slots`.
            usual: the way to weigh of the loss, which goes before the others.
        """
        self.slots[name] = *place, self._ways.learn(name, kinds, usual), turn


def common_kinds(told: Sequence[Mapping[Name, Kinds]]) -> dict[Name, Kinds]:
    """By name, the ways that all replicas allow that have written a value; ("",) if there are none.

    Args:
        told: by each of them.
    """
    found: dict[Name, Kinds] = {}
    for each in told:
        for name, ways in each.items():
            found[name] = tuple(way for way in found.get(name, ways) if way in ways) or ("",)
    return found


def kind_of_new(before: Any, left: Sequence[Any]) -> str:
    """Kind of a value that was not written when it was tried; empty if its values of micro-batches are of none.

    Args:
        before: its value before the step.
        left: what each micro-batch has left.
    """
    if all(is_equal(now, left[-1]) for now in left):
        return "same"
    if before is MISSING and sum(now is not MISSING for now in left) == 1:
        return "once"
    lists = all(isinstance(each, list) for each in (before, *left))  # some may not be there, and others be of a kind
    appended = lists and all(len(tail_of(before, now) or ()) == 1 for now in left)
    return LOSS if appended else ""


def tail_of(before: Any, now: Any) -> list[Any] | None:
    """The appended entries; ``None`` if anything else was done."""
    earlier, later, most = list(before), list(now), getattr(before, "maxlen", None)
    fewest = len(later) - len(earlier)
    for count in range(max(fewest, 0), (len(later) if len(later) == most else fewest) + 1):
        stays = len(later) - count
        if stays and not is_equal(earlier[-stays], later[0]):
            continue  # of most counts, without a look at all entries
        if all(map(is_equal, earlier[len(earlier) - stays :], later)):
            return later[stays:]
    return None


def was_seen(joins: Sequence[Join], name: Name) -> tuple[bool, bool]:
    """Whether several parts of one batch were seen to write a value, and whether some were and others were not.

    Args:
        joins: what was seen.
        name: of the value.
    """
    both = alone = False
    for join in joins:
        changed = [name in part and not is_equal(*part[name]) for part in join.parts]
        both, alone = both or sum(changed) > 1, alone or (any(changed) and not all(changed))
    return both, alone


def are_unlike(values: Sequence[Any]) -> bool | Tensor:
    """Whether small values that micro-batches have left are not the same; on an accelerator, a tensor that tells."""
    first, *others = map(_as_tensor, values)
    if type(first) in NUMBERS:
        return any(type(value) is type(first) and value != first for value in others)
    if type(first) is not Tensor or first.numel() > _SMALL:
        return False
    if any(type(value) is not Tensor or value.shape != first.shape for value in others):
        return False
    return torch.stack([(value.detach() != first.detach()).any() for value in others]).any() if others else False


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are the same but for rounding."""
    one, other = _as_tensor(one), _as_tensor(other)
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
    before, together, *apart = map(_as_tensor, (before, together, *apart))
    if not all(isinstance(value, (int, float, Tensor)) for value in (before, together, *apart)):
        return False
    start, end = torch.as_tensor(before), torch.as_tensor(together)
    if start.shape == (0,) and end.ndim:
        start = end[:0]  # `torch.tensor([])`, to which anything can be appended
    ends = [torch.as_tensor(value) for value in apart]
    if any(value.dtype == torch.bool for value in (start, end, *ends)):
        return False
    if any(value.shape != start.shape for value in (end, *ends)):
        alike = all(value.ndim == start.ndim > 0 for value in (end, *ends))
        grown = sum(len(value) - len(start) for value in ends) if alike else -1
        return alike and len(end) - len(start) == grown and is_equal(end[: len(start)], start)
    change, each = (end - start).double(), [(value - start).double() for value in ends]
    changes, most = torch.as_tensor(sum(each)), max(float(part.abs().amax()) if part.numel() else 0.0 for part in each)
    if most and float(change.abs().amax()) <= 1e-9 * most:
        return False  # the whole had been run before: means of its parts lie on both sides of what it left
    return bool(torch.allclose(change, changes, rtol=1e-5, atol=1e-12))


def _as_tensor(value: Any) -> Any:
    """An array or number of NumPy's as a tensor; anything else as it is."""
    numbers = is_array(value) and value.dtype.char in "efdbhilqB" and value.dtype.isnative
    return torch.as_tensor(value.copy()) if numbers else value


def sum_of_all(before: Any, left: Sequence[Any]) -> Any:
    """Sum of a value before a batch and of what each micro-batch has added to it.

    Args:
        before: the number, or the tensor; one that micro-batches make longer is joined along its first dimension.
        left: what each has left.
    """
    if all(now is before for now in left):
        return before
    if is_array(before):
        found = sum_of_all(_as_tensor(before), [_as_tensor(now) for now in left]).numpy()
        return found if before.ndim else found[()]
    if isinstance(before, Tensor) and any(now.shape != before.shape for now in left):
        return torch.cat([before, *(now[len(before) :] for now in left)])
    total = before
    for now in left:
        total = total + (now - before)
    return total
