"""Which parameters got a gradient on any rank, where gradients are scattered.

A parameter without gradient is left alone by the optimizer, as in one process, but only if no replica has one for it.
An all-reduced bucket carries the answer along; ranks that get a shard only ask for it once a step, all buckets at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.mesh.messages.collectives import start_all_reduce, wait_for


class FlagExchange:
    """Agreement on which parameters any rank gave a gradient, for buckets of one group that were scattered."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._complete = all(all(bucket.touched) for bucket in buckets)
        first, touched = buckets[0].own_gradients, [float(t) for bucket in buckets for t in bucket.touched]
        flags = first.new_ones(len(touched)) if self._complete else first.new_tensor(touched)
        self._flags, self._work = start_all_reduce(flags, buckets[0].sharing.group, keep=False)

    def finish(self) -> None:
        """Wait; the numbers are only looked at if this rank lacks some."""
        wait_for(self._work, "all_reduce", self._flags, self._buckets[0].sharing.group)
        if self._complete:
            return
        touched = iter((self._flags > 0).tolist())
        for bucket in self._buckets:
            bucket.touched = [next(touched) for _ in bucket.parameters]


def exchange_flags(buckets: list[Bucket]) -> Iterator[FlagExchange]:
    """Start one exchange per group."""
    groups: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        if bucket.scattered:
            groups.setdefault(id(bucket.sharing.group), []).append(bucket)
    for members in groups.values():
        yield FlagExchange(members)
