"""Finds which samples of the global batch are here, and which elements of one process's draw they get.

Worked example: a batch of 8 on two replicas, in micro-batches of 2. Micro-batch 1 of replica 1 has samples 6 and 7, and
draws a mask of shape [2, 3]; in one process that mask is [8, 3], and the rows that this one has of it are::

    index    0  1  2 │ ... │ 18 19 20 │ 21 22 23
    sample       0   │     │     6    │     7
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The samples of a (micro-)batch among those of the global batch.

    Attributes:
        first: number of its first sample in the global batch.
        size: how many it has.
        total: samples of the global batch.
        step: from a sample to the next; replicas that a sampler deals to in turns have every d-th.
    """

    first: int
    size: int
    total: int
    step: int = 1

    @property
    def are_all(self) -> bool:
        """Whether the whole global batch is here."""
        return self.size == self.total


class Deal(NamedTuple):
    """How the samples of a global batch are dealt out to the replicas.

    Attributes:
        replica: this one.
        replicas: how many there are.
        in_turns: whether sample i goes to replica i % d; or else each replica has neighbours.
    """

    replica: int = 0
    replicas: int = 1
    in_turns: bool = False

    def rows(self, sizes: Sequence[int]) -> list[Rows]:
        """The samples of each micro-batch of a batch of this replica, whose sizes are given."""
        own, found, start = sum(sizes), list[Rows](), 0
        for size in sizes:
            step = self.replicas if self.in_turns else 1
            first = start * step + self.replica * (1 if self.in_turns else own)
            found.append(Rows(first, size, own * self.replicas, step))
            start += size
        return found


class Slice(NamedTuple):
    """The part of a dim that is here: entries ``first``, ``first + 1``, ... of ``total``."""

    dim: int
    first: int
    total: int


class Batched(NamedTuple):
    """Layout of the samples in a drawn tensor.

    Attributes:
        dim: whose entries are samples, each of them ``each`` times.
        each: entries of a sample.
        inner: whether the samples vary faster than the entries of one (tokens x samples, flattened).
    """

    dim: int
    each: int = 1
    inner: bool = False


def global_indices(
    shape: Sequence[int], device: torch.device, rows: Rows, batched: Batched | None, cut: Slice | None = None
) -> Tensor:
    """Numbers of the elements of a drawn tensor in the tensor that one process draws.

    Args:
        shape: of what is drawn here.
        device: where.
        rows: the samples here.
        batched: where the samples are; ``None`` where the draw is one for the whole batch.
        cut: a dim of which this tensor rank has a part.

    Returns:
        int64, contiguous, of ``shape``.
    """
    count = math.prod(shape)
    whole = batched is None or rows.are_all
    if whole and cut is None:
        return torch.arange(count, device=device).view(tuple(shape))
    if batched is not None and cut is None and batched.dim == 0 and rows.step == 1 and not batched.inner:
        start = rows.first * (count // max(rows.size, 1))
        return torch.arange(start, start + count, device=device).view(tuple(shape))
    index, stride = torch.zeros((), dtype=torch.int64, device=device), 1
    for dim in reversed(range(len(shape))):
        along, total = torch.arange(shape[dim], device=device), shape[dim]
        if batched is not None and dim == batched.dim:
            along, total = _of_samples(rows, batched, device), rows.total * batched.each
        if cut is not None and dim == cut.dim:
            along, total = along + cut.first, cut.total
        index = index + (along * stride).view(-1, *[1] * (len(shape) - 1 - dim))
        stride *= total
    return index.expand(tuple(shape)).contiguous()


def _of_samples(rows: Rows, batched: Batched, device: torch.device) -> Tensor:
    """Entries of the dim with the samples, in one process."""
    samples = rows.first + rows.step * torch.arange(rows.size, device=device)
    each = torch.arange(batched.each, device=device)
    if batched.inner:
        return (each[:, None] * rows.total + samples).flatten()
    return (samples[:, None] * batched.each + each).flatten()
