"""Sums gradients over the replicas after every micro-batch, so that only shards of the sums add up over a step.

::

    backward of a micro-batch   layer 3   layer 2   layer 1   layer 0
    layer 3                     .grad     .grad     sum ───▶ shard += its part
    layer 2                               .grad     .grad    sum ───▶ shard += its part

The sum of a layer starts when its window has closed after it, in the order that replicas have agreed upon; at the end
of a step come those whose gradients arrived later, as the weights' halves of split backwards do. As sums are sums, it
does not matter which of them an arrival is in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.mesh.messages.collectives import start_all_reduce, wait_for

_UNDER_WAY = 2


class ShardSums:
    """The buckets whose shards add up.

    Args:
        reduce_dtype: in which sums travel; ``None`` for that of the main gradients.
        inspect: whether to note the largest absolute value of each gradient before it is summed.
    """

    def __init__(self, reduce_dtype: torch.dtype | None, inspect: bool) -> None:
        self._dtype, self._inspect = reduce_dtype, inspect
        self._under_way: list[Bucket] = []
        self._last: dict[int, Callable[[], None]] = {}  # by id of a bucket under way
        self._settled = False

    def begin(self, bucket: Bucket, *, fresh: bool, factor: float) -> None:
        """Prepare a bucket for the backwards of one batch.

        Args:
            bucket: of weights that lie apart.
            fresh: whether its sum starts from zero.
            factor: by what sums have been divided, if they are finished; they go on times that.
        """
        self._settled = False
        if bucket in self._under_way:  # of a batch that was tried, and is thrown away
            self._complete(bucket)
        if fresh or not any(bucket.touched):
            bucket.added, bucket.touched = None, [False] * len(bucket.parameters)
            bucket.maxima = {}
        elif bucket.reduced:
            bucket.added = bucket.own_gradients.clone().mul_(factor)
        bucket.let_go()
        bucket.keep_shard()
        bucket.adds, bucket.scattered, bucket.reduced, bucket.launched = True, True, False, True
        for parameter in bucket.parameters:
            parameter.grad = None

    def add_up(self, bucket: Bucket, last: Callable[..., None] | None = None, divide_by: float = 1.0) -> None:
        """Start the sum of what has arrived; collective over the replicas.

        Args:
            bucket: of the gradients.
            last: if no more is expected to arrive, called with the bucket, its shard and ``divide_by`` once that holds
                the sum, which :meth:`finish` divides.
            divide_by: see there.
        """
        if bucket in self._under_way:
            self._complete(bucket)
        bucket.allocate()
        for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if parameter.grad is None:
                view.zero_()
                continue
            bucket.touched[index] = True
            view.copy_(parameter.grad)
            parameter.grad = None
            if self._inspect:
                name, most = bucket.names[index], torch.linalg.vector_norm(view, float("inf"))
                bucket.maxima[name] = torch.maximum(most, bucket.maxima.get(name, most))
        bucket.start_sum(self._dtype)
        self._under_way.append(bucket)
        if last is not None:
            self._last[id(bucket)] = lambda: last(bucket, bucket.added, divide_by)
        if len(self._under_way) > _UNDER_WAY:
            self._complete(self._under_way[0])

    def _complete(self, bucket: Bucket) -> None:
        self._under_way = [other for other in self._under_way if other is not bucket]
        bucket.finish_sum()
        own = bucket.own_gradients
        bucket.added = own if bucket.added is None else bucket.added.add_(own)
        bucket.let_go()
        bucket.keep_shard()
        if (last := self._last.pop(id(bucket), None)) is not None:
            last()

    def settle(self, buckets: Sequence[Bucket]) -> None:
        """Sum what is left of a batch, on any replica; collective over them."""
        adding = [bucket for bucket in buckets if bucket.adds]
        if self._settled or not adding:
            return
        self._settled = True
        group, device = adding[0].sharing.group, adding[0].flat.device
        left = [float(any(parameter.grad is not None for parameter in bucket.parameters)) for bucket in adding]
        flags, work = start_all_reduce(torch.tensor(left, device=device), group, keep=False)
        wait_for(work, "all_reduce", flags, group)
        for bucket, some in zip(adding, flags.tolist(), strict=True):
            if some:
                self.add_up(bucket)
        for bucket in list(self._under_way):
            self._complete(bucket)

    def finish(
        self, buckets: Sequence[Bucket], divide_by: float, summed: Callable[[Bucket, Tensor], None] | None = None
    ) -> None:
        """Publish the shards of the sums, divided; ``summed`` is called with each bucket and its shard then."""
        for bucket in buckets:
            if bucket.adds:
                bucket.own = bucket.added
                if bucket.own is None:
                    bucket.own = bucket.flat.new_zeros(bucket.placement.shard)
                if divide_by != 1:
                    bucket.own.div_(divide_by)
                bucket.added, bucket.reduced = None, True
                bucket.point_pieces()
                if summed is not None:
                    summed(bucket, bucket.own)
