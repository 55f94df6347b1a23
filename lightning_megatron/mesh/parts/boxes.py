"""One description of the part of a logical tensor that a rank holds: a list of boxes.

A tensor-parallel slice, a packed query/key/value slice, a padded vocabulary and a flat optimizer shard that starts in
the middle of a row are all described alike: by boxes of the logical (global, unsplit) tensor, each with the offset and
strides of its elements in local memory. Checkpoints, export and optimizer shards use these boxes, and do not depend on
how a layer is split.

Example, ranks 0 and 1 of two, a fused query/key/value weight [12, 4] whose three segments are each split::

    global rows   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11
                  q0    q1    k0    k1    v0    v1
    rank 0 local  [0 1 4 5 8 9]     boxes (0,0)+(2,4)@0   (4,0)+(2,4)@8    (8,0)+(2,4)@16
    rank 1 local  [2 3 6 7 10 11]   boxes (2,0)+(2,4)@0   (6,0)+(2,4)@8   (10,0)+(2,4)@16
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Range = tuple[int, int]
"""Half-open range of indices along one dim of the logical tensor."""

VOCABULARY_MULTIPLE = 128


@dataclass(frozen=True)
class Box:
    """A rectangular part of a logical tensor, and its location in local memory.

    Attributes:
        offset: first index along every dim of the logical tensor.
        shape: extent along every dim.
        local_offset: index of its first element in the flattened local tensor, in elements.
        local_strides: strides of the box in the flattened local tensor, in elements.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local_offset: int
    local_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def of_full(self, full: Tensor) -> Tensor:
        """View of the box in the logical tensor: ``global_shape`` -> ``shape``."""
        return full[tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))]

    def of_local(self, local: Tensor) -> Tensor:
        """View of the box in the local tensor, which must be contiguous: ``local_shape`` -> ``shape``."""
        return local.reshape(-1).as_strided(self.shape, self.local_strides, local.storage_offset() + self.local_offset)


@dataclass(frozen=True)
class ShardSpec:
    """The part of a logical tensor that one rank holds.

    Attributes:
        global_shape: shape of the logical tensor, without padding.
        local_shape: shape of the local tensor, with padding.
        boxes: the parts held; elements of the local tensor in no box are padding.
    """

    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> ShardSpec:
        """The specification of a tensor that is not split."""
        shape = tuple(shape)
        return cls(shape, shape, (Box((0,) * len(shape), shape, 0, contiguous_strides(shape)),))

    @classmethod
    def along(cls, shape: Sequence[int], dim: int, ranges: Sequence[Range], local_size: int | None = None) -> ShardSpec:
        """The specification of ranges of indices along ``dim``, concatenated in the local tensor.

        Args:
            shape: logical shape.
            dim: the dim that is split.
            ranges: half-open ranges of logical indices; indices at or past the logical size are padding.
            local_size: size of the local dim if it is larger than the sum of the ranges; the rest is padding.
        """
        shape, dim = tuple(shape), dim % len(shape)
        length = sum(stop - start for start, stop in ranges) if local_size is None else local_size
        local_shape = (*shape[:dim], length, *shape[dim + 1 :])
        strides = contiguous_strides(local_shape)
        boxes, position = [], 0
        for start, stop in ranges:
            inside = min(stop, shape[dim]) - start
            if inside > 0:
                offset = tuple(start if d == dim else 0 for d in range(len(shape)))
                extent = (*shape[:dim], inside, *shape[dim + 1 :])
                boxes.append(Box(offset, extent, position * strides[dim], strides))
            position += stop - start
        return cls(shape, local_shape, tuple(boxes))

    @property
    def is_whole(self) -> bool:
        """Whether the local tensor is the logical tensor."""
        return self == ShardSpec.whole(self.global_shape)

    @property
    def numel(self) -> int:
        """Number of logical elements held, padding not counted."""
        return sum(box.numel for box in self.boxes)

    def slice_full(self, full: Tensor) -> Tensor:
        """Copy the local tensor out of the logical one; padding is zero. ``global_shape`` -> ``local_shape``.

        Raises:
            ValueError: ``full`` has another shape than ``global_shape``.
        """
        if tuple(full.shape) != self.global_shape:
            raise ValueError(f"Tensor of shape {tuple(full.shape)} given for a logical shape {self.global_shape}.")
        local = full.new_zeros(self.local_shape)
        if not local.is_meta:
            for box in self.boxes:
                box.of_local(local).copy_(box.of_full(full))
        return local

    def write_into(self, full: Tensor, local: Tensor) -> None:
        """Write this rank's boxes into the logical tensor.

        Args:
            full: the logical tensor, shape ``global_shape``; changed in place.
            local: the local tensor, shape ``local_shape``.
        """
        local = local.contiguous()
        for box in self.boxes:
            box.of_full(full).copy_(box.of_local(local))

    def flat_range(self, start: int, stop: int) -> ShardSpec:
        """The specification of elements [start, stop) of the flattened local tensor, as a flat local tensor.

        A range that starts or ends in the middle of a row gives several boxes per box.
        """
        boxes: list[Box] = []
        for box in self.boxes:
            for part in _contiguous_parts(box):
                boxes.extend(_clip(part, start, stop))
        return ShardSpec(self.global_shape, (max(0, stop - start),), tuple(boxes))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of ``shape``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def assemble(specs: Sequence[ShardSpec], locals_: Sequence[Tensor]) -> Tensor:
    """Assemble the logical tensor from the local tensors of all ranks.

    Args:
        specs: specification of each rank.
        locals_: local tensor of each rank.

    Raises:
        ValueError: the boxes do not cover the logical tensor.
    """
    shape = specs[0].global_shape
    full, covered = locals_[0].new_zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for spec, local in zip(specs, locals_, strict=True):
        spec.write_into(full, local)
        for box in spec.boxes:
            box.of_full(covered).fill_(True)
    if not bool(covered.all()):
        raise ValueError(
            f"{int((~covered).sum())} elements of a tensor of shape {shape} are on none of the ranks given."
        )
    return full


def block_range(size: int, parts: int, index: int) -> Range:
    """The ``index``-th of ``parts`` equal ranges of ``size`` indices; ``size`` must be divisible."""
    length = size // parts
    return index * length, (index + 1) * length


def packed_ranges(segments: Sequence[int], parts: int, index: int) -> tuple[Range, ...]:
    """The ``index``-th part of every segment of a packed dim, e.g. segments (h, h, h) of a fused query/key/value."""
    ranges, base = [], 0
    for segment in segments:
        start, stop = block_range(segment, parts, index)
        ranges.append((base + start, base + stop))
        base += segment
    return tuple(ranges)


def padded_vocabulary(size: int, parts: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """Vocabulary size rounded up to a multiple of ``multiple * parts``: 50257 over 2 ranks -> 50432."""
    step = multiple * parts
    return -(-size // step) * step


def key_value_heads(heads: int, key_value: int, parts: int, index: int) -> tuple[int, ...]:
    """Key/value heads that the query heads of one rank attend to, one entry per group of query heads.

    Args:
        heads: number of query heads, divisible by ``parts``.
        key_value: number of key/value heads; query head i uses key/value head ``i // (heads // key_value)``.
        parts: size of the tensor group.
        index: rank in it.

    Returns:
        Heads in order. With fewer heads than ranks, several ranks return the same head, which is replicated. If the
        query heads of this rank do not form groups of equal size, one entry per query head, with repetitions.
    """
    start, stop = block_range(heads, parts, index)
    group = heads // key_value
    read = [head // group for head in range(start, stop)]
    distinct = sorted(set(read))
    regular = len(read) % len(distinct) == 0 and read == [
        head for head in distinct for _ in range(len(read) // len(distinct))
    ]
    return tuple(distinct if regular else read)


def _contiguous_parts(box: Box) -> list[Box]:
    """Cut a box into boxes whose elements are contiguous in local memory."""
    if box.local_strides == contiguous_strides(box.shape) or box.numel == 0:
        return [box]
    if _rows_adjacent(box):
        return [box]
    parts: list[Box] = []
    for row in range(box.shape[0]):
        parts.extend(
            Box(
                (box.offset[0] + row, *inner.offset),
                (1, *inner.shape),
                inner.local_offset,
                (math.prod(inner.shape), *inner.local_strides),
            )
            for inner in _contiguous_parts(
                Box(box.offset[1:], box.shape[1:], box.local_offset + row * box.local_strides[0], box.local_strides[1:])
            )
        )
    return parts


def _rows_adjacent(box: Box) -> bool:
    expected = contiguous_strides(box.shape)
    return all(n == 1 or s == e for n, s, e in zip(box.shape, box.local_strides, expected, strict=True))


def _clip(box: Box, start: int, stop: int) -> list[Box]:
    """Clip a locally contiguous box to local elements [start, stop); its local offsets count from ``start``."""
    first, last = box.local_offset, box.local_offset + box.numel
    low, high = max(first, start), min(last, stop)
    if low >= high:
        return []
    pieces = _split_flat(box.shape, low - first, high - first)
    boxes, position = [], low - start
    for offset, shape in pieces:
        placed = tuple(a + b for a, b in zip(box.offset, offset, strict=True))
        boxes.append(Box(placed, shape, position, contiguous_strides(shape)))
        position += math.prod(shape)
    return boxes


def _split_flat(shape: tuple[int, ...], low: int, high: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (offset, shape) that cover flat elements [low, high) of a contiguous block, in order."""
    if not shape:
        return [((), ())]
    if len(shape) == 1:
        return [((low,), (high - low,))]
    row = math.prod(shape[1:])
    first, last = -(-low // row), high // row
    if first > last:
        return _within_row(shape, low // row, low % row, low % row + high - low)
    pieces = _within_row(shape, first - 1, low - (first - 1) * row, row) if low % row else []
    if last > first:
        pieces.append(((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if high % row:
        pieces.extend(_within_row(shape, last, 0, high % row))
    return pieces


def _within_row(shape: tuple[int, ...], row: int, low: int, high: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [((row, *offset), (1, *extent)) for offset, extent in _split_flat(shape[1:], low, high)]
