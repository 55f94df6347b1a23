"""Gradient buckets: where gradients collect, and how they are summed over replicas while backward still runs.

Parameters lie in contiguous buckets in reverse registration order, the order in which backward reaches them. A
parameter's ``.grad`` is a view into its bucket, so autograd accumulates straight into the buffer over all
micro-batches. In the last micro-batch a bucket's all-reduce starts the moment its last gradient has arrived::

    backward of the last micro-batch   layer 3 │ layer 2 │ layer 1 │ layer 0
    bucket 0 (layers 3, 2)                      └─ all-reduce ─┘
    bucket 1 (layers 1, 0)                                          └─ all-reduce ─┘

Buckets start in index order on every rank, which NCCL and gloo both need. Parameters that several stages hold (tied
embeddings) have buckets of their own, summed over those stages as well, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Bucket:
    """A contiguous buffer of gradients.

    Attributes:
        group: process group the sum runs over, or ``None`` if nobody else holds these gradients.
        shared: whether other stages hold these parameters too; such buckets are reduced last.
        flat: the buffer: the gradients one after the other, then one flag per parameter (was it touched?).
    """

    names: list[str]
    parameters: list[nn.Parameter]
    group: Any
    shared: bool
    flat: Tensor
    views: list[Tensor]
    flags: Tensor
    touched: list[bool] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)
    work: Any = None
    launched: bool = False


class GradientBuckets:
    """Collects, sums over replicas and publishes the gradients of this rank's parameters.

    Args:
        parameters: name -> parameter, in registration order.
        data_group: group over which replicas are summed; ``None`` with one replica.
        shared: name -> group (over stages, and replicas) for parameters that several stages hold.
        bucket_bytes: buffer size at which a new bucket starts.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        data_group: Any,
        shared: Mapping[str, Any],
        bucket_bytes: int,
    ) -> None:
        self._parameters = dict(parameters)
        self._data_group = data_group
        self._shared = shared
        self._bucket_bytes = bucket_bytes
        self._final: bool | frozenset[int] = False
        self._reduce = False
        self._copy_late = False
        self._divide_by = 1
        self._hooks: list[Any] = []
        self.buckets: list[Bucket] = []
        self._bucketed: set[int] = set()
        self._next_launch = 0
        self._build()

    def begin(self, *, fresh: bool | None, reduce: bool, divide_by: int = 1) -> None:
        """Prepare for the backward(s) of one batch.

        A parameter's first gradient is copied into its bucket as it arrives (or with its whole bucket, if no second one
        can follow); then ``.grad`` becomes the view, and autograd adds further ones in place.

        Args:
            fresh: whether to start from zero, as opposed to adding to an accumulation that is under way; ``None``
                decides per parameter by whether it has a ``.grad``, as autograd would.
            reduce: whether the sum over replicas follows at the end of this batch.
            divide_by: what the sums are divided by: the number of replicas, unless the loss was scaled already.
        """
        if any(p.requires_grad and id(p) not in self._bucketed for p in self._parameters.values()):
            self._build()
        self._reduce = reduce
        self._final = False
        self._next_launch = 0
        self._divide_by = divide_by
        self._copy_late = (
            fresh is None and reduce and all(parameter.grad is None for parameter in self._parameters.values())
        )
        for bucket in self.buckets:
            bucket.ready.clear()
            bucket.work = None
            bucket.launched = False
            if fresh:
                bucket.touched = [False] * len(bucket.parameters)
            elif fresh is None:
                self._adopt(bucket)
            for parameter, view, touched in zip(bucket.parameters, bucket.views, bucket.touched, strict=True):
                parameter.grad = view if touched else None

    @staticmethod
    def _adopt(bucket: Bucket) -> None:
        for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            bucket.touched[index] = parameter.grad is not None
            if parameter.grad is not None and parameter.grad is not view:
                view.copy_(parameter.grad)

    def withdraw(self) -> None:
        """Take the gradients out of sight, so that ``zero_grad`` between the step and its backward cannot wipe them."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def set_final(self, final: bool | frozenset[int]) -> None:
        """Say which gradients that arrive from now on are the last of this batch: all, none, or those of some ids."""
        self._final = final

    def finish(self) -> None:
        """Wait for the sums, divide them, and leave ``.grad`` of every touched parameter pointing at its sum."""
        if self._reduce:
            for bucket in self.buckets:
                if not bucket.launched:
                    self._launch(bucket)
            for bucket in self.buckets:
                self._complete(bucket, self._divide_by)
        self.publish()

    def publish(self) -> None:
        """Point ``.grad`` at the buffers: ``None`` for parameters that got no gradient, as in one process."""
        for bucket in self.buckets:
            for parameter, view, touched in zip(bucket.parameters, bucket.views, bucket.touched, strict=True):
                parameter.grad = view if touched else None

    def close(self) -> None:
        """Remove the autograd hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _build(self) -> None:
        self.close()
        self._bucketed = {id(p) for p in self._parameters.values() if p.requires_grad}
        self.buckets = []
        own = [(n, p) for n, p in self._parameters.items() if p.requires_grad and n not in self._shared]
        for names in _fill(reversed(own), self._bucket_bytes):
            self.buckets.append(self._make_bucket(names, self._data_group, shared=False))
        by_group: dict[Any, list[tuple[str, nn.Parameter]]] = {}
        for name, group in self._shared.items():
            parameter = self._parameters[name]
            if parameter.requires_grad:
                by_group.setdefault((id(group), parameter.dtype), []).append((name, parameter))
        for members in by_group.values():
            self.buckets.append(self._make_bucket(members, self._shared[members[0][0]], shared=True))

    def _make_bucket(self, members: Sequence[tuple[str, nn.Parameter]], group: Any, shared: bool) -> Bucket:
        parameters = [parameter for _, parameter in members]
        first = parameters[0]
        total = sum(parameter.numel() for parameter in parameters)
        flat = torch.zeros(total + len(parameters), dtype=first.dtype, device=first.device)
        views, offset = [], 0
        for parameter in parameters:
            views.append(_view_like(flat[offset : offset + parameter.numel()], parameter))
            offset += parameter.numel()
        bucket = Bucket([name for name, _ in members], parameters, group, shared, flat, views, flat[total:])
        bucket.touched = [False] * len(parameters)
        for index, parameter in enumerate(parameters):
            hook = _ArrivalHook(self, bucket, index)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        return bucket

    def arrived(self, bucket: Bucket, index: int) -> None:
        """Note that the gradient of one parameter has been accumulated; called by autograd."""
        parameter, view = bucket.parameters[index], bucket.views[index]
        if not self._copy_late and parameter.grad is not view and parameter.grad is not None:
            view.copy_(parameter.grad)
            parameter.grad = view
        bucket.touched[index] = True
        if not self._reduce or bucket.shared:
            return
        if bucket.launched:
            raise RuntimeError(
                f"`{bucket.names[index]}` received a gradient after its bucket was reduced. It is used in several "
                "parts of the module under reentrant activation checkpointing; use "
                "`torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`."
            )
        if self._final is True or (self._final and id(parameter) in self._final):
            bucket.ready.add(index)
            self._launch_complete()

    def _launch_complete(self) -> None:
        while self._next_launch < len(self.buckets):
            bucket = self.buckets[self._next_launch]
            if bucket.shared or len(bucket.ready) < len(bucket.parameters):
                return
            self._launch(bucket)
            self._next_launch += 1

    def _launch(self, bucket: Bucket) -> None:
        bucket.launched = True
        if self._copy_late:
            self._copy_whole(bucket)
        if bucket.group is None:
            return
        bucket.flags.fill_(1.0)
        for index, touched in enumerate(bucket.touched):
            if not touched:
                bucket.views[index].zero_()
                bucket.flags[index] = 0.0
        bucket.work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)

    @staticmethod
    def _copy_whole(bucket: Bucket) -> None:
        """Copy all gradients of a bucket at once: one launch instead of one per parameter."""
        pairs = [(v, p) for v, p in zip(bucket.views, bucket.parameters, strict=True) if p.grad is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [p.grad for _, p in pairs])  # type: ignore[misc]
        for view, parameter in pairs:
            parameter.grad = view

    @staticmethod
    def _complete(bucket: Bucket, divide_by: int) -> None:
        if bucket.work is not None:
            bucket.work.wait()
            bucket.work = None
            if not all(bucket.touched):
                bucket.touched = [flag > 0 for flag in bucket.flags.tolist()]
        if divide_by != 1:
            bucket.flat.div_(divide_by)


class _ArrivalHook:
    """Autograd's callback for one parameter."""

    def __init__(self, owner: GradientBuckets, bucket: Bucket, index: int) -> None:
        self._owner, self._bucket, self._index = owner, bucket, index

    def __call__(self, parameter: Tensor) -> None:
        self._owner.arrived(self._bucket, self._index)


def _view_like(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """View of ``flat`` with the parameter's shape and, if dense, its strides, which autograd wants of ``.grad``."""
    if parameter.is_contiguous():
        return flat.view(parameter.shape)
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.permute(order).is_contiguous():
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)


def _fill(members: Iterable[tuple[str, nn.Parameter]], limit: int) -> list[list[tuple[str, nn.Parameter]]]:
    """Group consecutive parameters of one dtype into runs of about ``limit`` bytes."""
    runs: list[list[tuple[str, nn.Parameter]]] = []
    size = 0
    for name, parameter in members:
        bytes_ = parameter.numel() * parameter.element_size()
        same = runs and runs[-1][0][1].dtype == parameter.dtype and runs[-1][0][1].device == parameter.device
        if not same or size + bytes_ > limit:
            runs.append([])
            size = 0
        runs[-1].append((name, parameter))
        size += bytes_
    return runs
