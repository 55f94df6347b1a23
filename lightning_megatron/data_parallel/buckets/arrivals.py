"""Autograd's hooks that tell when a parameter's gradient has arrived, and what is done when all of a bucket have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.data_parallel.buckets.bucket import Bucket


class ArrivalHook:
    """Autograd's post-accumulate hook of one parameter.

    Once the gradient accumulates in place, the hook has nothing to do until the last micro-batch. It unregisters itself
    until then, as one call per parameter and micro-batch costs more than a small layer.

    Args:
        arrived: told of the gradient, by bucket and place; says whether the hook may sleep.
        bucket: of the parameter.
        index: its place there.
    """

    def __init__(self, arrived: Callable[[Bucket, int], bool], bucket: Bucket, index: int) -> None:
        self._arrived, self._bucket, self._index = arrived, bucket, index
        self._parameter = bucket.parameters[index]
        self._handle = self._parameter.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:  # autograd also calls for a parameter in its graph to which a function gave none
            return
        if gradient.is_sparse and self._bucket.sharing.group is not None:
            parameter.grad = gradient.to_dense()  # rows differ from replica to replica; the buffer has all of them
        if self._arrived(self._bucket, self._index):
            self._others().pop(self._handle.id, None)

    def wake(self) -> None:
        """Register the hook again, after all other hooks of the parameter."""
        self._others()[self._handle.id] = self

    def remove(self) -> None:
        """Remove the hook for good."""
        self._handle.remove()

    def _others(self) -> dict[int, Any]:
        hooks: dict[int, Any] = self._parameter._post_accumulate_grad_hooks
        return hooks


def copy_arrived(bucket: Bucket) -> None:
    """Copy all gradients into their bucket with one foreach call instead of one copy per parameter."""
    pairs = [(v, p) for v, p in zip(bucket.views, bucket.parameters, strict=True) if p.grad is not None]
    if pairs:
        torch._foreach_copy_([view for view, _ in pairs], [p.grad for _, p in pairs])  # type: ignore[misc]
    for view, parameter in pairs:
        parameter.grad = view


def late_gradient(name: str) -> str:
    """Error for a gradient that arrives after its bucket was summed."""
    return (
        f"`{name}` received a gradient after its bucket was reduced. It is used in several parts of the module under "
        "reentrant activation checkpointing; use `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`."
    )


def changed_dtype(name: str, before: torch.dtype, now: torch.dtype) -> str:
    """Error for a parameter whose dtype changed after its bucket was made."""
    return (
        f"`{name}` was {before} when the run began and is {now} since a forward: code of the module converts its "
        "weights there, after optimizers and gradients were laid out. Convert it in `__init__`, or let both be of one "
        "dtype (Switch Transformers: `config.router_dtype`)."
    )
