"""The weights of a bucket in one flat buffer, so that one all-gather distributes the updated shards."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.data_parallel.buckets.shards import Placement


@dataclass
class FlatWeights:
    """Weights of a bucket, moved into a flat buffer as this rank's optimizer updates only a shard of them.

    Attributes:
        flat: [placement.total], the weights that the layers compute with.
        own: [placement.shard], this rank's shard of ``flat``, a view.
        master: [placement.shard], the weights that the optimizer updates: ``own`` itself, or a float32 copy of it.
        views: per parameter, the view of ``flat`` that is its ``parameter.data``.
    """

    flat: Tensor
    own: Tensor
    master: Tensor
    views: list[Tensor] = field(default_factory=list)

    @property
    def lowered(self) -> bool:
        """Whether the layers compute with a narrower dtype than the optimizer updates."""
        return self.master.dtype != self.flat.dtype

    def recover(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take over weights that user code has changed: ``parameter.data = ...``, or writes to lowered weights."""
        for parameter, view in zip(parameters, self.views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view
        if self.lowered:
            changed = self.own != self.master.to(self.own.dtype)
            self.master.copy_(torch.where(changed, self.own.to(self.master.dtype), self.master))


class _WithoutBucket:
    """Pickles one parameter; torch would take the whole memory that it looks into along, for each parameter anew."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = weakref.ref(parameter)

    def __call__(self, protocol: Any) -> Any:
        parameter: Any = self._parameter()
        kind: Any = type(parameter)
        if kind is not nn.Parameter:  # a hook sees it whole, and it is pickled as it is seen
            return kind.__reduce_ex__(parameter, protocol)
        alone: Any = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        alone.__dict__.update({name: value for name, value in parameter.__dict__.items() if value is not self})
        return alone.__reduce_ex__(protocol)


def take_weights(
    parameters: Sequence[nn.Parameter],
    placement: Placement,
    rank: int,
    dtype: torch.dtype,
    master: torch.dtype,
    *,
    gradients: torch.dtype,
) -> FlatWeights:
    """Move the weights of ``parameters`` into one buffer, and this rank's shard of them into the master weights.

    Args:
        parameters: in the order of ``placement``; afterwards their data are views of the buffer, and ``.grad`` is None.
        placement: layout of the buffer.
        rank: index of this rank's shard.
        dtype: dtype of the weights that the layers compute with.
        master: dtype of the weights that the optimizer updates.
        gradients: dtype of the main gradients; parameters of another dtype get it as their ``grad_dtype``.
    """
    flat = torch.zeros(placement.total, dtype=dtype, device=parameters[0].device)
    low, high = placement.bounds(rank)
    own = flat[low:high]
    weights = FlatWeights(flat, own, own if dtype == master else own.to(master))
    for part in placement.parts(rank):
        source = parameters[part.member].data.reshape(-1)[part.start : part.stop]
        part.of(weights.master).copy_(source)
    for parameter, offset in zip(parameters, placement.offsets, strict=True):
        view = flat[offset : offset + parameter.numel()].view(parameter.shape)
        view.copy_(parameter.data)
        parameter.grad = None
        parameter.data = view
        parameter.__dict__["__reduce_ex__"] = _WithoutBucket(parameter)
        if dtype != gradients:
            parameter.grad_dtype = gradients
        weights.views.append(view)
    return weights
