"""Agrees which parameters got a gradient on any rank, for buckets that are reduce-scattered.

The optimizer skips a parameter without gradient, as in one process, but only if no replica has a gradient for it. An
all-reduced bucket carries one flag per parameter with its gradients. For reduce-scattered buckets, one all-reduce per
step and group carries the flags of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.mesh.messages.collectives import start_all_reduce, wait_for


class FlagExchange:
    """All-reduce of the flags of reduce-scattered buckets, under way from construction to :meth:`finish`.

    Args:
        buckets: of one group, in the same order on all of its ranks.
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._complete = all(all(bucket.touched) for bucket in buckets)
        first, touched = buckets[0].own_gradients, [float(t) for bucket in buckets for t in bucket.touched]
        flags = first.new_ones(len(touched)) if self._complete else first.new_tensor(touched)
        self._flags, self._work = start_all_reduce(flags, buckets[0].sharing.group, keep=False)

    def finish(self) -> None:
        """Wait for the flags and set ``touched``; the device is only read if a gradient is missing on this rank."""
        wait_for(self._work, "all_reduce", self._flags, self._buckets[0].sharing.group)
        if self._complete:
            return
        touched = iter((self._flags > 0).tolist())
        for bucket in self._buckets:
            bucket.touched = [next(touched) for _ in bucket.parameters]


def exchange_flags(buckets: list[Bucket]) -> Iterator[FlagExchange]:
    """Start one exchange per group that has reduce-scattered buckets."""
    groups: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        if bucket.scattered:
            groups.setdefault(id(bucket.sharing.group), []).append(bucket)
    for members in groups.values():
        yield FlagExchange(members)
