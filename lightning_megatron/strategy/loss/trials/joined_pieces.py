"""Pieces of a trial of the loss: neighbouring micro-batches, two of them at once, and more where they are small.

A layer may compute something else of many samples than of few, as one with a capacity does. So all micro-batches of a
small batch are tried, and the whole of it as well; of a larger one, which may not fit at once, some.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning_megatron.mesh.batches import batch_size_of, samples_of, tensors_of
from lightning_megatron.mesh.draws.global_rows import Deal, Rows
from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.loss.class_weights import class_weighted
from lightning_megatron.strategy.loss.counted import candidates
from lightning_megatron.strategy.loss.weighing import Finding, TrialRun, find

_LEAST = 1e-6  # how unlike a part is that counts nothing, whose loss tells less than that of another
_PARTS = 5  # most micro-batches that are tried of a batch that is not small
_NO_CLASSES: Mapping[str, Any] = MappingProxyType({})
_FEW_AT_ONCE = 4  # of which neighbours are tried with besides, all at once
_NUMBERS = 8192  # most numbers in a tensor of a batch that is small, however many samples they are of
AT_ONCE = 16  # samples in a trial where micro-batches meet that are no neighbours; these may be all that a batch has


class TriedParts(NamedTuple):
    """Parts of a batch that is not cut.

    Attributes:
        whole: all of their samples.
        parts: two or more.
        size: samples of this replica's batch.
        borrowed: the first of two neighbouring replicas whose batches they are; ``None`` where they are of this one's.
        at_once: whether all of the parts are tried at once, and not each two neighbours.
    """

    whole: Any
    parts: list[Any]
    size: int
    borrowed: int | None = None
    at_once: bool = False


class Joins:
    """Runs of a trial: neighbouring micro-batches, each two of them at once, and four of them; of a small batch,
    all micro-batches, and the whole.

    Args:
        batch: the whole.
        parts: its micro-batches, two or more.
        sample: of the batch that one of them has to hold; ``None`` for any.
        small: see :func:`is_small`; the same on ranks that run the pieces together.

    Attributes:
        pieces: in the order in which they run.
        joins: place of several at once among the pieces -> places of the one, the other, ...
        first: number of the first sample of the pieces in the batch.
    """

    def __init__(self, batch: Any, parts: Sequence[Any], sample: int | None = None, *, small: bool) -> None:
        ends = list(accumulate((batch_size_of(part) for part in parts), initial=0))
        found = unlike_pair(batch, parts) if sample is None else bisect_right(ends, sample) - 1
        start = 0 if small else max(0, min(found - 1, len(parts) - _PARTS))
        self.pieces, self.first = [parts[start]], ends[start]
        self.joins: dict[int, tuple[int, ...]] = {}
        for index in range(start + 1, len(parts) if small else min(start + _PARTS, len(parts))):
            last = len(self.pieces)
            before = 0 if last == 1 else last - 2
            self.pieces += [parts[index], samples_of(batch, ends[index - 1], ends[index + 1])]
            self.joins[last + 1] = (before, last)
        singles = [0, *(places[-1] for places in self.joins.values())]
        singles = singles if small else singles[:_FEW_AT_ONCE]
        if len(parts) > 2 and (small or ends[start + len(singles)] - ends[start] <= AT_ONCE):
            self.joins[len(self.pieces)] = tuple(singles)
            self.pieces.append(samples_of(batch, ends[start], ends[start + len(singles)]))

    def rows(self) -> list[Rows]:
        """The samples of each piece, among those of all."""
        sizes = [batch_size_of(piece) for piece in self.pieces]
        singles = [place for place in range(len(sizes)) if place not in self.joins]
        found = dict(zip(singles, Deal().rows([sizes[place] for place in singles]), strict=True))
        for both, places in self.joins.items():
            found[both] = found[places[0]]._replace(size=sizes[both])
        return [found[place] for place in range(len(sizes))]

    def finding(
        self, runs: Sequence[TrialRun], constants: Collection[int] = (), classes: Mapping[str, Any] = _NO_CLASSES
    ) -> Finding:
        """How the loss and the logs of pieces at once come of those of each.

        Args:
            runs: of all pieces.
            constants: that the step compares integers with, which it may ignore.
            classes: weights by class, by which targets may be weighed.
        """
        findings = []
        for both, pair in self.joins.items():
            parts = [self.pieces[index] for index in pair]
            counted = candidates(self.pieces[both], *parts, constants=constants)
            ways = (*counted, *class_weighted(classes, self.pieces[both]))
            counts = {way: [way(part) for part in parts] for way in ways}
            sizes = [float(batch_size_of(part)) for part in parts]
            findings.append(find([runs[index] for index in pair], runs[both], sizes, counts))
        return findings[0].joined(findings[1:])


def is_small(batch: Any, group: Any = None) -> bool:
    """Whether a batch may run whole in a trial, which keeps nothing for a backward, but has all logits at once.

    Args:
        batch: the whole.
        group: of ranks whose batches all have to be; ``None`` for this one alone. Collective over it.
    """
    most = max((tensor.numel() for tensor in tensors_of(batch)), default=0)
    small = batch_size_of(batch) <= AT_ONCE or most <= _NUMBERS
    return small if group is None else all(objects.gather(small, group))


def unlike_pair(batch: Any, parts: Sequence[Any]) -> int:
    """The first of two neighbours among some batches that have as unlike numbers of targets as any.

    Args:
        batch: one that is like them all.
        parts: two or more.
    """
    best, place = 0.0, 0
    for way in candidates(batch, *parts):
        if way.ignored is None and not tensors_of(batch)[way.place].is_floating_point():
            continue  # lengths, or anything else, such as classes
        counts = [way(part) / batch_size_of(part) for part in parts]
        for index, (one, other) in enumerate(pairwise(counts)):
            unlike = abs(one - other) / max(one, other) if min(one, other) > 0 else _LEAST * (one != other)
            if way.ignored == -100:
                unlike *= math.e  # torch's own mark for what is no target goes before a token that may be one
            if unlike > best + 1e-9:
                best, place = unlike, index
    return place
