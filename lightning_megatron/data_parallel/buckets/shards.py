"""Layout of parameters in the flat buffer of a bucket, and the part of each parameter in each shard.

A bucket is cut into equal shards, one per rank of the shard group. For an optimizer that updates every element by
itself, parameters lie end to end and a cut may go through one. For an optimizer that needs whole matrices, shards end
where parameters end, which costs some padding::

    sizes 6 4 5, two shards     elements   a a a a a a b b │ b b c c c c c .
                                whole      a a a a a a . . . │ b b b b c c c c c
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


class ShardPart(NamedTuple):
    """Elements [start, stop) of the flattened parameter ``member``, lying at ``at`` in the shard."""

    member: int
    start: int
    stop: int
    at: int

    def of(self, shard: Tensor) -> Tensor:
        """View of these elements in a shard; ``shard``: [elements of a shard] -> [stop - start]."""
        return shard[self.at : self.at + self.stop - self.start]


@dataclass(frozen=True)
class FlatPlacement:
    """Layout of a flat buffer.

    Attributes:
        sizes: elements of each parameter.
        offsets: index in the buffer of the first element of each parameter.
        shard: elements of one shard.
        shards: number of shards; the buffer has ``shard * shards`` elements.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    shard: int
    shards: int

    @property
    def total(self) -> int:
        """Elements of the buffer, padding included."""
        return self.shard * self.shards

    def bounds(self, rank: int) -> tuple[int, int]:
        """First element of shard ``rank`` in the buffer, and the first one after it."""
        return rank * self.shard, (rank + 1) * self.shard

    def parts(self, rank: int) -> list[ShardPart]:
        """The parts of parameters in shard ``rank``, in order; parameters outside of it are left out."""
        low, high = self.bounds(rank)
        found = []
        for member, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            start, stop = max(offset, low), min(offset + size, high)
            if start < stop:
                found.append(ShardPart(member, start - offset, stop - offset, start - low))
        return found


def place(sizes: Sequence[int], shards: int, *, whole: bool = False) -> FlatPlacement:
    """Lay parameters out over equal shards.

    Args:
        sizes: elements of each parameter, in order.
        shards: number of shards, at least 1.
        whole: whether no parameter may be cut.
    """
    if not whole or shards == 1:
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += size
        return FlatPlacement(tuple(sizes), tuple(offsets), -(-end // shards), shards)
    shard = _smallest_shard(sizes, shards)
    offsets, begin, used = [], 0, 0
    for size in sizes:
        if used + size > shard:
            begin, used = begin + shard, 0
        offsets.append(begin + used)
        used += size
    return FlatPlacement(tuple(sizes), tuple(offsets), shard, shards)


def _smallest_shard(sizes: Sequence[int], shards: int) -> int:
    """The smallest size of ``shards`` runs of consecutive parameters, found by bisection."""
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _runs(sizes, middle) <= shards:
            high = middle
        else:
            low = middle + 1
    return low


def _runs(sizes: Sequence[int], limit: int) -> int:
    runs, used = 1, 0
    for size in sizes:
        if used + size > limit:
            runs, used = runs + 1, 0
        used += size
    return runs


def views(
    flat: Tensor, placement: FlatPlacement, parameters: Sequence[nn.Parameter], *, contiguous: bool
) -> list[Tensor]:
    """Views of ``flat`` with the shapes of the parameters.

    Args:
        flat: the whole buffer.
        placement: of the parameters in it.
        parameters: in the order of the placement.
        contiguous: whether to leave out the strides of parameters that are laid out otherwise.
    """
    if contiguous and sum(placement.sizes[:-1]) == placement.offsets[-1]:  # no gaps: one call for all
        with torch._C.DisableTorchFunction():  # which reads shapes only, whoever watches uses
            return list(torch._C._nn.unflatten_dense_tensors(flat[: sum(placement.sizes)], [*parameters]))
    return [
        _view_like(flat[offset : offset + parameter.numel()], parameter, contiguous=contiguous)
        for offset, parameter in zip(placement.offsets, parameters, strict=True)
    ]


def _view_like(flat: Tensor, parameter: nn.Parameter, *, contiguous: bool) -> Tensor:
    """View of ``flat`` with the parameter's shape and, if dense, its strides, which autograd wants of ``.grad``."""
    if contiguous or parameter.is_contiguous():
        return flat.view(parameter.shape)
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.permute(order).is_contiguous():
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view(parameter.shape)
