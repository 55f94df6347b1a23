"""The order in which the sums of gradients start, which is that of the buckets on all replicas.

A bucket's sum starts when its last gradient is there. Which gradients come, and when, depends on the batch: an expert
without tokens gets none, and its bucket waits for the end of the backward on that replica alone. As the order of sums
is fixed, that mixes nothing up while replicas exchange nothing else. Where they do, they *pace* each other: with each
message about a layer's window a replica tells how many buckets are complete, and as many sums start as are complete on
all of them, at the same place between the other messages::

    replica 0   window 2, 3 complete         window 1, 4 complete   3 sums start   window 0
    replica 1   window 2, 3 complete         window 1, 3 complete   3 sums start   window 0      and the rest at the end
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from lightning_megatron.data_parallel.buckets.bucket import Bucket


class Launches:
    """How far the sums of one backward have come.

    Args:
        start: starts the sum of a bucket; collective over those who hold its parameters.

    Attributes:
        paced: whether sums start when all replicas have said that they can, instead of at once.
        on_end: called before the first of those sums that start as the last backward is through; ``None`` for nothing.
    """

    def __init__(self, start: Callable[[Bucket], None]) -> None:
        self._start, self._next, self.paced = start, 0, False
        self._ended, self.on_end = False, cast(Callable[[], None] | None, None)

    def begin(self) -> None:
        """Nothing has been summed."""
        self._next, self._ended = 0, False

    def end(self) -> None:
        """No gradient arrives any more."""
        if not self._ended and self.on_end is not None:
            self.on_end()
        self._ended = True

    def complete(self, buckets: Sequence[Bucket]) -> int:
        """How many of the buckets, in their order, have all their gradients."""
        count = self._next
        while count < len(buckets) and _is_complete(buckets[count]):
            count += 1
        return count

    def start(self, buckets: Sequence[Bucket], most: int) -> None:
        """Start the sums of the first ``most`` buckets, up to one that is not complete."""
        while self._next < min(most, len(buckets)) and _is_complete(buckets[self._next]):
            bucket = buckets[self._next]
            if not (bucket.adds or bucket.launched):
                self._start(bucket)
            self._next += 1


def _is_complete(bucket: Bucket) -> bool:
    return bucket.adds or len(bucket.ready) == len(bucket.parameters)


def is_final(bucket: Bucket, final: bool | frozenset[int]) -> bool:
    """Whether the gradients of a bucket that arrive now are the last of the batch.

    Args:
        bucket: of the parameters.
        final: see :meth:`.GradientBuckets.set_final`.
    """
    if isinstance(final, bool):
        return final
    return all(id(parameter) in final for parameter in bucket.parameters)
