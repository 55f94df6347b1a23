"""Gradients that code of the user has put elsewhere, taken back into their bucket.

``p.grad = new`` binds another tensor; ``p.grad.data = new``, and ``vector_to_parameters(new, gradients)``, let the view
into the bucket itself look elsewhere. What the optimizer and later backwards read is the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.data_parallel.buckets.shards import views
from lightning_megatron.mesh.messages.collectives import extremes_over

_ALIKE = {torch.float64: 1e-9}  # relative
_ABOUT_ALIKE = 1e-4


def adopt(bucket: Bucket) -> None:
    """Take over the present ``.grad`` of the parameters, ``None`` included."""
    point_back(bucket)
    if _bound_anew(bucket):
        bucket.keep_all()
    for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
        bucket.touched[index] = parameter.grad is not None
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad)


def check_alike(buckets: Iterable[Bucket]) -> None:
    """Refuse gradients that a step has bound anew and that are another one on another rank; collective over the ranks
    of each bucket with such gradients.

    Raises:
        RuntimeError: naming the parameter and the way out.
    """
    for bucket in buckets:
        group, bound = bucket.sharing.group, _bound_anew(bucket)
        if group is None or not bound:
            continue
        sums = torch.stack([gradient.detach().sum(dtype=torch.float64) for gradient in bound.values()])
        sizes = torch.stack([gradient.detach().abs().sum(dtype=torch.float64) for gradient in bound.values()])
        lowest, highest = extremes_over(sums, group)
        apart = ((highest - lowest) / sizes.clamp(min=1e-30)).tolist()
        for (name, gradient), difference in zip(bound.items(), apart, strict=True):
            if not difference <= _ALIKE.get(gradient.dtype, _ABOUT_ALIKE):
                raise RuntimeError(
                    f"the step sets `.grad` of `{name}` to a tensor that is another one on other replicas. What "
                    "`torch.autograd.grad` gives is of this replica's samples; what `self.manual_backward` leaves in "
                    "`.grad` is of all. Compute from the latter, or from `self.all_gather(gradient).mean(0)`, or use "
                    "one replica."
                )


def _bound_anew(bucket: Bucket) -> dict[str, Tensor]:
    """Gradients that the user's code has assigned, by name of the parameter: those that are not views of the bucket."""
    each = zip(bucket.names, bucket.parameters, bucket.views, strict=True)
    return {name: p.grad for name, p, view in each if p.grad is not None and p.grad is not view}


def point_back(bucket: Bucket) -> None:
    """Point views that were moved out of the bucket back into it, and copy their values there."""
    flat, before = bucket.flat, bucket.views
    if not bucket.keeps_all:
        return
    memories = {view.untyped_storage()._cdata for view in before}  # in every step: one call for each
    if memories <= {flat.untyped_storage()._cdata}:
        return
    bucket.views = views(flat, bucket.placement, bucket.parameters, contiguous=bucket.weights is not None)
    for parameter, old, view in zip(bucket.parameters, before, bucket.views, strict=True):
        if parameter.grad is old:
            if not _lies_in(old, flat):
                view.copy_(old)
            parameter.grad = view


def _lies_in(view: Tensor, flat: Tensor) -> bool:
    return view.untyped_storage()._cdata == flat.untyped_storage()._cdata
