"""Gradient buckets: accumulate gradients in flat buffers, and overlap their reduction with the backward.

Parameters lie in contiguous buckets in reverse registration order, the order in which backward reaches them. A
parameter's ``.grad`` is a view into its bucket, so autograd accumulates into the buffer in place over all
micro-batches. In the last micro-batch, the reduction of a bucket starts once its last gradient has arrived::

    backward of the last micro-batch   layer 3 │ layer 2 │ layer 1 │ layer 0
    bucket 0 (layers 3, 2)                      └─ reduce ────┘
    bucket 1 (layers 1, 0)                                          └─ reduce ────┘

Without optimizer sharding the reduction is an all-reduce. With it, the reduction is a reduce-scatter: each rank gets
the sum of its shard only, and ``.grad`` of the parameters is ``None`` afterwards. If the user's code reads ``.grad``
(in a hook between backward and update), buckets are all-reduced in either case.

Reductions start in index order on every rank, as NCCL and gloo require. Parameters that several stages hold (tied
embeddings) have buckets of their own, which are reduced last, over those stages too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_megatron.data_parallel.buckets.arrivals import ArrivalHook, changed_dtype, copy_arrived, late_gradient
from lightning_megatron.data_parallel.buckets.bucket import USUAL_LAYOUT, Bucket, Piece, WeightLayout, make_bucket
from lightning_megatron.data_parallel.buckets.filling import fill, fill_by_holders
from lightning_megatron.data_parallel.buckets.flags import exchange_flags
from lightning_megatron.data_parallel.buckets.holders import Sharing
from lightning_megatron.data_parallel.buckets.launches import Launches, is_final
from lightning_megatron.data_parallel.buckets.rebound import adopt, point_back
from lightning_megatron.data_parallel.buckets.shard_sums import ShardSums


class GradientBuckets:
    """Accumulates the gradients of this rank's parameters, reduces them over replicas, and sets ``.grad``.

    Invariant: all holders of a parameter have it at the same place of equal buckets, and start their sums in one order.

    Args:
        parameters: name -> parameter, in registration order.
        replicas: the ranks that hold the parameters of this stage.
        shared: name -> the ranks that hold it, for parameters of several stages, or of several tensor-parallel ranks
            with a partial sum of the gradient each.
        bucket_bytes: buffer size in bytes at which a new bucket starts.
        layout: how weights are kept.
        reads_gradients: whether the user's code reads ``.grad`` after a reduction.
        inspect: whether to take the largest absolute value of each gradient before the reduction, for
            :meth:`first_bad`.
        reduce_dtype: communication dtype of the reductions; by default that of the main gradients.
        apart: name -> layer, for parameters whose weights are there only while their layer needs them.
        sums_shards: whether gradients of these are summed after every micro-batch.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        replicas: Sharing,
        shared: Mapping[str, Sharing],
        bucket_bytes: int,
        *,
        layout: WeightLayout = USUAL_LAYOUT,
        reads_gradients: bool = False,
        inspect: bool = False,
        reduce_dtype: torch.dtype | None = None,
        apart: Mapping[str, str] | None = None,
        sums_shards: bool = False,
    ) -> None:
        self._parameters = dict(parameters)
        self._replicas = replicas
        self._shared = shared
        self._bucket_bytes = bucket_bytes
        self._lowered, self._apart = layout.lowered, apart or {}
        self._reads_gradients = reads_gradients
        self._inspect = inspect
        self._reduce_dtype = reduce_dtype
        self._layout = layout
        self._sums = ShardSums(reduce_dtype, inspect) if sums_shards and not reads_gradients else None
        self._final: bool | frozenset[int] = False
        self._reduce = False
        self._copy_late = False
        self._divide_by = 1.0
        self._hooks: dict[int, ArrivalHook] = {}
        self._asleep, self._rests = set[int](), False
        self._own: list[Bucket] = []
        self._tied: list[Bucket] = []
        self.places: dict[int, tuple[Bucket, int]] = {}  # by id of a parameter: its bucket, and its index there
        self.launches = Launches(self._launch)
        self._under_way: list[Bucket] = []
        self.on_arrival: Callable[[Bucket, int], None] | None = None
        self.on_summed: Callable[..., None] | None = None  # :meth:`.SentGradients.send`
        self._build()

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in the order in which their reductions start."""
        return self._own + self._tied

    @property
    def reads_gradients(self) -> bool:
        """Whether ``.grad`` of every parameter holds its full sum after a reduction."""
        return self._reads_gradients

    @property
    def reduces(self) -> bool:
        """Whether this batch's gradients are summed over the replicas, for an update."""
        return self._reduce

    @property
    def scatters(self) -> bool:
        """Whether reductions are reduce-scatters, after which each rank holds only its shard of the sums."""
        sharings = (self._replicas, *self._shared.values())
        return not self._reads_gradients and any(sharing.shards > 1 for sharing in sharings)

    @property
    def updates_pieces(self) -> bool:
        """Whether the optimizer updates pieces instead of the parameters."""
        return any(bucket.weights is not None for bucket in self.buckets)

    def place_of(self, parameter: nn.Parameter) -> tuple[Bucket, int] | None:
        """The bucket of a parameter, and its index there; ``None`` if it never took part in training."""
        return self.places.get(id(parameter))

    def piece_of(self, parameter: nn.Parameter) -> Piece | None:
        """This rank's piece of a parameter; ``None`` if it has none, or the optimizer updates the parameter itself."""
        bucket, index = self.places.get(id(parameter), (None, 0))
        return bucket.pieces.get(index) if bucket is not None else None

    def begin(
        self, *, fresh: bool | None, reduce: bool, divide_by: int = 1, scale: float = 1.0, once: bool = False
    ) -> None:
        """Prepare for the backward(s) of one batch.

        A parameter's first gradient is copied into its bucket when it arrives; then ``.grad`` becomes the view, and
        autograd accumulates later gradients in place. Where nothing accumulates (``once``, ``reduce``, and no gradient
        from before), the copies are made per bucket instead, when its last gradient is there: one fused call, and no
        memory for buckets that backward has not reached. Only then may a bucket keep no more than its shard.

        Args:
            fresh: whether gradients start from zero, or accumulate onto earlier ones; ``None`` decides per parameter by
                whether it has a ``.grad``, as autograd does.
            reduce: whether gradients are reduced over replicas at the end of this batch.
            divide_by: divisor of the sums: the number of replicas, unless the loss was divided by it.
            scale: factor of the loss; the sums are divided by it too.
            once: whether a single backward follows.
        """
        if any(p.requires_grad for p in self._unplaced):
            self._build()
        self._reduce = reduce
        self._final = False
        self._rests = fresh is not None
        self._wake(True)
        self.launches.begin()
        self._divide_by = divide_by * scale
        late, others = once and reduce, self._begin_sums(fresh, scale * divide_by)
        for bucket in others:  # all must agree on `late` before any is laid out for it
            point_back(bucket)
            bucket.launched = False
            bucket.ready = {index for index, p in enumerate(bucket.parameters) if not p.requires_grad}
            if fresh:
                bucket.touched = [False] * len(bucket.parameters)
            elif fresh is None:
                bucket.keep_all()
                adopt(bucket)
            late = late and not any(bucket.touched)
        self._copy_late = late
        for bucket in others:
            if late and bucket.sharing.shards > 1 and self.scatters and not bucket.keeps_all:
                bucket.keep_shard()
            else:
                bucket.keep_all()
            bucket.resume(scale, divide_by)
            for parameter, view, touched in zip(bucket.parameters, bucket.views, bucket.touched, strict=True):
                parameter.grad = view if touched else None

    def _begin_sums(self, fresh: bool | None, factor: float) -> list[Bucket]:
        """Prepare the buckets whose shards add up; the others."""
        others = []
        for bucket in self.buckets:
            bucket.adds = False
            if self._sums is not None and fresh is not None and bucket.lies_apart and bucket.sharing.shards > 1:
                self._sums.begin(bucket, fresh=fresh, factor=factor)
            else:
                others.append(bucket)
        return others

    def add_up(self, buckets: Sequence[Bucket]) -> None:
        """Sum what has arrived in these buckets, where shards of sums add up; collective over the replicas."""
        for bucket in buckets:
            if self._sums is not None and bucket.adds:
                early = self.on_summed if self._reduce and is_final(bucket, self._final) else None
                self._sums.add_up(bucket, early, self._divide_by)

    def withdraw(self) -> None:
        """Set ``.grad`` to ``None``, so that ``zero_grad`` between step and backward cannot clear the buffers."""
        if self._sums is not None:
            self._sums.settle(self.buckets)
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def set_final(self, final: bool | frozenset[int]) -> None:
        """Declare which gradients that arrive from now on are the last of this batch.

        Args:
            final: all, none, or those of the parameters with these ids.
        """
        self._final = final
        if final and self._reduce and not (self._replicas.group is self.on_summed is None):
            self._wake(final)

    def pace(self, paced: bool) -> None:
        """Let sums start at :meth:`launch` from now on, or as soon as they can."""
        self.launches.paced = paced
        if not paced:
            self.launch(len(self._own))

    @property
    def complete(self) -> int:
        """How many sums could start, in their order, where replicas pace each other."""
        return self.launches.complete(self._own) if self.launches.paced and self._reduce and self._final else 0

    def launch(self, count: int) -> None:
        """Start the sums of the first ``count`` buckets, as far as they are complete; collective over their holders."""
        if self._reduce and self._final:
            self.launches.start(self._own, count)

    def _wake(self, which: bool | frozenset[int]) -> None:
        chosen = list(self._asleep) if which is True else [key for key in self._asleep if which and key in which]
        for key in chosen:
            self._asleep.discard(key)
            self._hooks[key].wake()

    def all_arrived(self) -> None:
        """Start the reductions that wait for a gradient that did not come, for which zeros count.

        On another replica it may have come, and the reduction be under way: between the replicas, it comes before
        whatever they exchange next, on all of them.
        """
        self.launches.end()
        if self._reduce:
            for bucket in [bucket for bucket in self._own if not (bucket.launched or bucket.adds)]:
                self._launch(bucket)

    def finish(self) -> None:
        """Wait for the reductions, divide the sums, and publish them; collective over the holders if ``reduce``."""
        self.launches.end()
        if self._sums is not None:
            self._sums.settle(self.buckets)
        if self._reduce:
            if self._sums is not None:
                self._sums.finish(self.buckets, self._divide_by, self.on_summed)
            for bucket in self.buckets:
                if not bucket.launched:
                    self._launch(bucket)
            flags = [*exchange_flags(self._own), *exchange_flags(self._tied)]
            for bucket in self.buckets:
                if not bucket.reduced:
                    self._complete(bucket)
            self._under_way = []
            for exchange in flags:
                exchange.finish()
        self._final = False
        self.publish()

    def publish(self) -> None:
        """Set ``.grad`` of parameters and pieces to views of the sums; ``None`` for those that got no gradient."""
        for bucket in self.buckets:
            for parameter, view, touched in zip(bucket.parameters, bucket.views, bucket.touched, strict=True):
                parameter.grad = view if touched and not bucket.scattered else None
            for index, piece in bucket.pieces.items():
                there = bucket.touched[index] and (bucket.reduced or not bucket.adds)
                piece.update.grad = piece.grad if there else None

    def adopt(self) -> None:
        """Take over changes that the user's code made to ``.grad`` since :meth:`publish`."""
        for bucket in self.buckets:
            if bucket.pieces and not bucket.scattered:
                adopt(bucket)
                for index, piece in bucket.pieces.items():
                    piece.update.grad = piece.grad if bucket.touched[index] else None

    def held(self) -> list[Tensor]:
        """The main gradients that this rank holds: one flat tensor per bucket, its shard if reduce-scattered."""
        return [bucket.own_gradients if bucket.scattered else bucket.gradients for bucket in self.buckets]

    def first_bad(self) -> str | None:
        """Name of the first parameter, in registration order, whose gradient before the reduction was not finite.

        Only with ``inspect``; ``None`` if all were finite on this rank.
        """
        found = [found for bucket in self.buckets for found in bucket.maxima.items()]
        bad = {name for name, most in found if not bool(torch.isfinite(most))}
        return next((name for name in self._parameters if name in bad), None)

    def close(self) -> None:
        """Remove the autograd hooks; existing ``.grad`` stay, in the dtype of their parameters."""
        for bucket in self.buckets:
            bucket.release_parameters()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self._asleep = set()

    def _build(self) -> None:
        """Make buckets for trained parameters that have none yet: all at first, later those just unfrozen."""
        new = {n: p for n, p in self._parameters.items() if p.requires_grad and id(p) not in self.places}
        own = [(n, p) for n, p in new.items() if n not in self._shared]
        for members in fill(reversed(own), self._bucket_bytes, self._lowered, self._apart):
            self._own.append(self._make(members, self._replicas, shared=False))
        for members in fill_by_holders(new, self._shared, self._lowered):
            self._tied.append(self._make(members, self._shared[members[0][0]], shared=True))
        self._unplaced = [p for p in self._parameters.values() if id(p) not in self.places]

    def _make(self, members: list[tuple[str, nn.Parameter]], sharing: Sharing, shared: bool) -> Bucket:
        apart = not shared and members[0][0] in self._apart
        bucket = make_bucket(members, sharing, shared=shared, apart=apart, layout=self._layout)
        bucket.scattered = False
        for index, parameter in enumerate(bucket.parameters):
            self.places[id(parameter)] = bucket, index
            self._hooks[id(parameter)] = ArrivalHook(self.arrived, bucket, index)
        return bucket

    def arrived(self, bucket: Bucket, index: int) -> bool:
        """Note that autograd has accumulated a gradient, and start the reductions that are complete with it.

        Returns:
            Whether the hook may sleep until the last micro-batch: until then gradients accumulate in place.

        Raises:
            RuntimeError: the reduction of the bucket has started already.
        """
        parameter, view = bucket.parameters[index], bucket.views[index]
        if self.on_arrival is not None:
            self.on_arrival(bucket, index)
        if bucket.adds:
            return False
        if not self._copy_late and parameter.grad is not view and parameter.grad is not None:
            view.copy_(parameter.grad)
            try:
                parameter.grad = view
            except RuntimeError as error:
                if parameter.dtype == view.dtype:
                    raise
                raise RuntimeError(changed_dtype(bucket.names[index], view.dtype, parameter.dtype)) from error
        bucket.touched[index] = True
        if bucket.launched and self._reduce and not bucket.shared:
            raise RuntimeError(late_gradient(bucket.names[index]))
        if self._rests and not self._final:
            self._asleep.add(id(parameter))
            return True
        final = self._final is True or (self._final and id(parameter) in self._final)
        if final and self._reduce and not bucket.shared:
            bucket.ready.add(index)
            if len(bucket.ready) == len(bucket.parameters) and not self.launches.paced:
                self.launches.start(self._own, len(self._own))
        return False

    def _launch(self, bucket: Bucket) -> None:
        bucket.launched = True
        if bucket.shard_only:
            bucket.allocate()
        if self._copy_late:
            copy_arrived(bucket)
        sharing = bucket.sharing
        bucket.maxima = {}
        if self._inspect:
            views = {n: view for n, view, t in zip(bucket.names, bucket.views, bucket.touched, strict=True) if t}
            maxima = torch._foreach_norm(list(views.values()), float("inf")) if views else []
            bucket.maxima = dict(zip(views, maxima, strict=True))
        if sharing.group is None:
            if self.on_summed is not None:
                self._complete(bucket)
            return
        bucket.flags.fill_(1.0)
        for index, touched in enumerate(bucket.touched):
            if not touched:
                bucket.views[index].zero_()
                bucket.flags[index] = 0.0
        bucket.scattered = sharing.shards > 1 and self.scatters
        if bucket.shard_only:  # free the gradients: the buffer holds them, and its reduction may reuse their memory
            for parameter in bucket.parameters:
                parameter.grad = None
        bucket.start_sum(self._reduce_dtype)
        if bucket.shard_only or self.on_summed is not None:
            self._under_way.append(bucket)
            if len(self._under_way) > (1 if self.launches.paced else 2):  # where they start a layer later
                self._complete(self._under_way.pop(0))

    def _complete(self, bucket: Bucket) -> None:
        bucket.reduced = True
        if bucket.finish_sum() and not bucket.scattered and not all(bucket.touched):
            bucket.touched = [flag > 0 for flag in bucket.flags.tolist()]
        if bucket.shard_only:
            bucket.let_go()
        if self._divide_by != 1:
            (bucket.own_gradients if bucket.scattered else bucket.flat).div_(self._divide_by)
        if self.on_summed is not None:
            self.on_summed(bucket, bucket.own_gradients)
