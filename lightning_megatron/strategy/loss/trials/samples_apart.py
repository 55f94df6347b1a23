"""Later trials of batches that are cut, in which samples meet that no two neighbouring micro-batches hold.

A loss of pairs looks like a mean over samples as long as the two of a pair are never seen together: they are in
micro-batches that are no neighbours, or on two replicas::

    replica 0   a b | c d | a b | c d      a meets b, c, d in trials of neighbours, and its own kind only at once
    replica 1   e f | ...                  whose partners are all on replica 0

So where there are few samples, later trials take the micro-batches of a batch all at once, and some of two replicas.
Of many, the first and later trials take two that share a number which no two neighbours do (a person, a text)::

    ids         0 1 | 2 3 | 0 4 | ...      0 1 and 0 4 at once

So do trials of batches in which samples share a number for the first time (:mod:`.meetings`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

from torch import Tensor

from lightning_megatron.mesh.batches import batch_size_of, map_tensors
from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.data.joined_batches import joined_batches
from lightning_megatron.strategy.loss.counted import integers_of
from lightning_megatron.strategy.loss.over_replicas import OverReplicas, samples_in
from lightning_megatron.strategy.loss.trials.joined_pieces import AT_ONCE, Joins, TriedParts, is_small, unlike_pair


class AllJoined(Joins):
    """Runs of a trial: each micro-batch, and all of them at once.

    Args:
        batch: the whole.
        parts: its micro-batches, two or more.
    """

    def __init__(self, batch: Any, parts: Sequence[Any]) -> None:
        self.pieces, self.first = [*parts, batch], 0
        self.joins = {len(parts): tuple(range(len(parts)))}


def joins_of(of: TriedParts, sample: int | None, group: Any) -> Joins:
    """Runs of a trial of some parts. Collective over the replicas.

    Args:
        of: the parts.
        sample: see :class:`.Joins`.
        group: the replicas.
    """
    if of.at_once:
        return AllJoined(of.whole, of.parts)
    return Joins(of.whole, of.parts, sample, small=is_small(of.whole, group))


def all_of(
    batch: Any, parts: Sequence[Any], replicas: OverReplicas | None, met: Collection[int] = (), *, later: bool
) -> Iterator[TriedParts]:
    """Micro-batches that are to be tried at once; of many samples, some. Collective over the world.

    Args:
        batch: of this replica.
        parts: its micro-batches, two or more.
        replicas: what trials have to do with the others; ``None`` for one.
        met: as :func:`sharing` takes it.
        later: whether the trial is not the first.
    """
    yield from sharing(batch, parts, replicas, met)
    found = None if replicas is None or not later else _of_two(batch, parts, replicas)
    if found is not None:
        yield found


def sharing(
    batch: Any, parts: Sequence[Any], replicas: OverReplicas | None, met: Collection[int] = ()
) -> Iterator[TriedParts]:
    """Two parts whose samples share a number, of one replica or of two; all try the same. Collective over the world.

    Args:
        batch: of this replica.
        parts: of it.
        replicas: what trials have to do with the others; ``None`` for one.
        met: places of the tensors whose numbers count, in neighbours too; all by default, of parts that are none.
    """
    integers = ([each for each in integers_of(part) if each[1].ndim == 1] for part in parts)
    columns = [[tensor.tolist() for at, tensor in each if not met or at in met] for each in integers]
    told = [columns] if replicas is None else objects.gather([] if replicas.kept.places else columns, replicas.group)
    chosen = _apart_in(told, near=bool(met))
    if chosen is None:
        return
    if replicas is None:
        pair = [parts[at] for _, at in chosen]
    else:
        mine = {at: map_tensors(parts[at], Tensor.cpu) for _, at in chosen if at < len(parts)}
        held, device = objects.gather(mine, replicas.group), replicas.device
        pair = [map_tensors(held[replica][at], lambda tensor: tensor.to(device)) for replica, at in chosen]
    both = joined_batches(*pair)
    if both is not None:
        yield TriedParts(both, pair, batch_size_of(batch), at_once=True)


def _apart_in(
    columns: Sequence[Sequence[Sequence[Sequence[int]]]], *, near: bool = False
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Replicas and places of two parts that share a number of which there is one for each sample; ``None`` where no two
    do, or neighbours as well, which are tried anyhow.

    Args:
        columns: by replica, part and tensor, the numbers of its samples.
        near: whether neighbours will do.
    """
    if not all(columns):
        return None
    for tensor in range(min(len(part) for parts in columns for part in parts)):
        numbers = [[part[tensor] for part in parts] for parts in columns]
        sets = [list(map(set, each)) for each in numbers]
        within = any(len(set(part)) < len(part) for each in numbers for part in each)
        if not near and (within or any(one & other for each in sets for one, other in pairwise(each))):
            continue
        seen: dict[int, tuple[int, int]] = {}
        for place in ((replica, part) for replica, each in enumerate(sets) for part in range(len(each))):
            found = sets[place[0]][place[1]]
            shared = next((seen[number] for number in sorted(found) if number in seen), None)
            if shared is not None:
                return shared, place
            seen |= dict.fromkeys(found, place)
    return None


def _of_two(batch: Any, parts: Sequence[Any], replicas: OverReplicas) -> TriedParts | None:
    """The first half of a replica's micro-batches and that of its neighbour: as many samples as a step holds."""
    least = min(objects.gather(samples_in(batch) if batch_size_of(batch) <= AT_ONCE else 0, replicas.world))
    if not least:
        return None
    half = list(parts[: max(1, len(parts) // 2)])
    told = objects.gather(map_tensors(half, Tensor.cpu), replicas.group)
    first = unlike_pair(batch, [each[0] for each in told])
    chosen = [map_tensors(part, lambda tensor: tensor.to(replicas.device)) for part in (*told[first], *told[first + 1])]
    both = reduce(lambda one, other: None if one is None else joined_batches(one, other), chosen)
    if not all(objects.gather(both is not None, replicas.world)):
        return None
    return TriedParts(both, chosen, batch_size_of(batch), borrowed=first, at_once=True)
