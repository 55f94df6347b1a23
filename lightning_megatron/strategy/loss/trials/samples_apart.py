"""Later trials of batches that are cut, in which samples meet that no two neighbouring micro-batches hold.

A loss of pairs looks like a mean over samples as long as the two of a pair are never seen together: they are in
micro-batches that are no neighbours, or on two replicas::

    replica 0   a b | c d | a b | c d      a meets b, c, d in trials of neighbours, and its own kind only at once
    replica 1   e f | ...                  whose partners are all on replica 0

So where there are few samples, later trials take the micro-batches of a batch all at once, and some of two replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

from torch import Tensor

from lightning_megatron.mesh.batches import batch_size_of, map_tensors
from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.data.joined_batches import joined_batches
from lightning_megatron.strategy.loss.over_replicas import OverReplicas, TriedParts, samples_in
from lightning_megatron.strategy.loss.trials.pieces_tried import AT_ONCE, FEW_AT_ONCE, Joins, unlike_pair


class AllJoined(Joins):
    """Runs of a trial: each micro-batch, and all of them at once.

    Args:
        batch: the whole.
        parts: its micro-batches, two or more.
    """

    def __init__(self, batch: Any, parts: Sequence[Any]) -> None:
        self.pieces, self.first = [*parts, batch], 0
        self.joins = {len(parts): tuple(range(len(parts)))}


def all_of(batch: Any, parts: Sequence[Any], replicas: OverReplicas | None) -> Iterator[TriedParts]:
    """Micro-batches that are to be tried all at once; none where there are many samples. Collective over the world.

    Args:
        batch: of this replica.
        parts: its micro-batches, two or more.
        replicas: what trials have to do with the others; ``None`` for one.
    """
    size = batch_size_of(batch)
    if len(parts) > FEW_AT_ONCE and size <= AT_ONCE:  # of fewer, trials of neighbours take all at once as well
        yield TriedParts(batch, list(parts), size, at_once=True)
    found = None if replicas is None else _of_two(batch, parts, replicas)
    if found is not None:
        yield found


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
