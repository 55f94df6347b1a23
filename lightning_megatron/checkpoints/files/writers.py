"""Assigns each part of a tensor to one of the ranks that hold it, so that every element is written once.

Replicas hold the same boxes. Tensor ranks that share a key/value head or a replicated parameter hold overlapping boxes,
and flat shards of such parameters overlap at different borders on every rank. The assignment works on rectangles only:
equal boxes go to the holder with the least to write, and of overlapping boxes the later one is cut to the part that the
earlier ones leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


@dataclass
class Shares:
    """Number of bytes assigned to each rank so far.

    Attributes:
        load: bytes by rank.
    """

    load: list[int] = field(default_factory=list)

    def assign(self, holders: Sequence[int], nbytes: int) -> int:
        """Assign ``nbytes`` to the holder with the least to write, the lowest rank in a tie; returns its rank."""
        rank = min(holders, key=lambda holder: (self.load[holder], holder))
        self.load[rank] += nbytes
        return rank


def intersection(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """The common part of two rectangles, or ``None``. Rectangles without dims (scalars) are equal."""
    offset, shape = [], []
    for (a, n), (b, m) in zip(zip(*one, strict=True), zip(*other, strict=True), strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        offset.append(low)
        shape.append(high - low)
    return tuple(offset), tuple(shape)


def subtract(rectangle: Rectangle, hole: Rectangle) -> list[Rectangle]:
    """``rectangle`` without ``hole``, as rectangles that do not overlap (at most two per dim)."""
    common = intersection(rectangle, hole)
    if common is None:
        return [rectangle]
    parts: list[Rectangle] = []
    offset, shape = list(rectangle[0]), list(rectangle[1])
    for dim, (low, length) in enumerate(zip(*common, strict=True)):
        before, after = low - offset[dim], offset[dim] + shape[dim] - (low + length)
        if before:
            parts.append((tuple(offset), (*shape[:dim], before, *shape[dim + 1 :])))
        if after:
            start = (*offset[:dim], low + length, *offset[dim + 1 :])
            parts.append((start, (*shape[:dim], after, *shape[dim + 1 :])))
        offset[dim], shape[dim] = low, length
    return parts


def share_out(
    held: Sequence[tuple[int, Rectangle]], shape: Sequence[int], itemsize: int, shares: Shares
) -> Iterator[tuple[int, Rectangle]]:
    """Yield (rank, rectangle) such that every element of a tensor is written once.

    Args:
        held: rank and rectangle of every box of the tensor; empty rectangles are skipped.
        shape: the tensor's logical shape.
        itemsize: bytes per element.
        shares: bytes assigned so far; updated.

    Raises:
        ValueError: some elements of the tensor are on no rank.
    """
    holders: dict[Rectangle, list[int]] = {}
    for rank, rectangle in held:
        if math.prod(rectangle[1]):
            holders.setdefault(rectangle, []).append(rank)
    covered = 0
    active: list[Rectangle] = []
    for rectangle in sorted(holders):
        active = [other for other in active if not other[0] or other[0][0] + other[1][0] > rectangle[0][0]]
        rest = [rectangle]
        for other in active:
            rest = [part for piece in rest for part in subtract(piece, other)]
        active.append(rectangle)
        for part in rest:
            size = math.prod(part[1])
            covered += size
            yield shares.assign(holders[rectangle], size * itemsize), part
    if covered != math.prod(shape):
        raise ValueError(
            f"{math.prod(shape) - covered} of the {math.prod(shape)} elements (shape {tuple(shape)}) are on no rank."
        )
