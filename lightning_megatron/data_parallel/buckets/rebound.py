"""Gradients that code of the user has put elsewhere, taken back into their bucket.

``p.grad = new`` binds another tensor; ``p.grad.data = new``, and ``vector_to_parameters(new, gradients)``, let the view
into the bucket itself look elsewhere. What the optimizer and later backwards read is the bucket.
"""

from __future__ import annotations

from torch import Tensor

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.data_parallel.buckets.shards import views


def adopt(bucket: Bucket) -> None:
    """Take over what ``.grad`` of the parameters is now, or that it is ``None``."""
    point_back(bucket)
    for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
        bucket.touched[index] = parameter.grad is not None
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad)


def point_back(bucket: Bucket) -> None:
    """Let views that look elsewhere lie in the bucket again, with the numbers that they have."""
    flat, before = bucket.flat, bucket.views
    if not bucket.keeps_all or all(_lies_in(view, flat) for view in before):
        return
    bucket.views = views(flat, bucket.placement, bucket.parameters, contiguous=bucket.weights is not None)
    for parameter, old, view in zip(bucket.parameters, before, bucket.views, strict=True):
        if parameter.grad is old:
            if not _lies_in(old, flat):
                view.copy_(old)
            parameter.grad = view


def _lies_in(view: Tensor, flat: Tensor) -> bool:
    return view.untyped_storage()._cdata == flat.untyped_storage()._cdata
