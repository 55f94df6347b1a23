"""Matrices that tensor-parallel ranks hold in slices, put together for an optimizer that needs them whole.

Muon orthogonalizes a matrix, Adafactor looks at its rows and columns: neither can step on a slice. Each such parameter
belongs to one rank of the tensor group. That rank gets all slices of its weight and gradient, updates the whole, and
gives the slices of the new weight back. It alone keeps the optimizer's state::

                     slices            all-to-all                    all-to-all
    tensor rank 0    a0 b0 c0    →     a0 a1 c0 c1    update a, c    →    a0 b0 c0
    tensor rank 1    a1 b1 c1    →     b0 b1          update b       →    a1 b1 c1

One message in each direction carries all parameters. Parameters that every tensor-parallel rank holds whole are updated
by each of them, as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.data_parallel.buckets.bucket import Piece
from lightning_megatron.mesh.parts.boxes import ShardSpec
from lightning_megatron.mesh.watch import waits

Slices = tuple[ShardSpec, ...]
"""What each rank of the tensor group holds of one parameter."""


@dataclass(frozen=True)
class Matrix:
    """A parameter that is put together for its update.

    Attributes:
        slices: what each rank of the tensor group holds.
        owner: the rank of the tensor group that updates it.
        update: what stands in for it in the owner's optimizer; it holds numbers during an update only.
    """

    slices: Slices
    owner: int
    update: nn.Parameter

    @property
    def spec(self) -> ShardSpec:
        """The logical parameter as one piece."""
        return ShardSpec.whole(self.slices[0].global_shape)


class WholeMatrices:
    """The split parameters of one optimizer.

    Args:
        group: the tensor group.
        slices_of: how the tensor group holds a parameter; ``None`` if every rank has all of it.
    """

    def __init__(self, group: Any, slices_of: Callable[[nn.Parameter], Slices | None]) -> None:
        self._group, self._slices_of = group, slices_of
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._matrices: dict[int, Matrix] = {}
        self._loads = [0] * self._size
        self._gathered: list[tuple[Matrix, Piece]] = []

    def matrix_of(self, parameter: nn.Parameter) -> Matrix | None:
        """How a parameter of which this rank has a piece is put together; ``None`` for one that is whole here.

        The owner is the rank with the least to do, so parameters must be asked for in the same order on all ranks.
        """
        found = self._matrices.get(id(parameter))
        slices = self._slices_of(parameter) if found is None else None
        if slices is not None:
            owner = self._loads.index(min(self._loads))
            self._loads[owner] += math.prod(slices[0].global_shape)
            stand_in = parameter.detach().new_zeros(()).expand(slices[0].global_shape)
            found = self._matrices[id(parameter)] = Matrix(slices, owner, nn.Parameter(stand_in))
        return found

    def owns(self, matrix: Matrix) -> bool:
        """Whether this rank updates a matrix."""
        return matrix.owner == self._rank

    def gather(self, pieces: Sequence[tuple[nn.Parameter, Piece]]) -> None:
        """Bring weights and gradients to the owners; collective over the tensor group.

        Args:
            pieces: this rank's pieces of all parameters that are updated, in the same order on all ranks.
        """
        members = [(matrix, piece) for parameter, piece in pieces if (matrix := self.matrix_of(parameter)) is not None]
        self._gathered = [(matrix, piece) for matrix, piece in members if piece.update.grad is not None]
        for dtype in _dtypes(self._gathered):
            chosen = [(matrix, piece) for matrix, piece in self._gathered if piece.update.dtype == dtype]
            own, like = [matrix for matrix, _ in chosen if self.owns(matrix)], chosen[0][1].update.data
            parts = [
                [value for matrix, piece in chosen if matrix.owner == rank for value in _numbers(piece)]
                for rank in range(self._size)
            ]
            sizes = [[math.prod(matrix.slices[rank].local_shape) for matrix in own] for rank in range(self._size)]
            received = self._exchange(parts, [[size for size in line for _ in range(2)] for line in sizes], like)
            for index, matrix in enumerate(own):
                weight, grad = (_assemble(matrix, [line[2 * index + which] for line in received]) for which in range(2))
                matrix.update.data = weight
                matrix.update.grad = grad

    def scatter(self) -> None:
        """Bring the slices of updated weights back; collective over the tensor group."""
        gathered, self._gathered = self._gathered, []
        for dtype in _dtypes(gathered):
            chosen = [(matrix, piece) for matrix, piece in gathered if piece.update.dtype == dtype]
            own = [matrix for matrix, _ in chosen if self.owns(matrix)]
            parts = [[m.slices[rank].slice_full(m.update.data) for m in own] for rank in range(self._size)]
            sizes = [[p.update.numel() for m, p in chosen if m.owner == rank] for rank in range(self._size)]
            received = self._exchange(parts, sizes, chosen[0][1].update.data)
            for rank, line in enumerate(received):
                for (matrix, piece), part in zip([e for e in chosen if e[0].owner == rank], line, strict=True):
                    for box in matrix.slices[self._rank].boxes:  # padding keeps its numbers
                        box.of_local(piece.update.data).copy_(box.of_local(part))
        self.release()

    def release(self) -> None:
        """Let go of whole matrices."""
        self._gathered = []
        for matrix in self._matrices.values():
            if matrix.update.grad is not None:
                matrix.update.grad = None
                matrix.update.data = matrix.update.data.new_zeros(()).expand(matrix.spec.global_shape)

    def _exchange(self, parts: list[list[Tensor]], sizes: list[list[int]], like: Tensor) -> list[list[Tensor]]:
        """Send ``parts[r]`` to every rank r; returns flat tensors of ``sizes[r]`` elements from each."""
        sent = torch.cat([like.new_empty(0), *(part.reshape(-1) for line in parts for part in line)])
        outgoing, incoming = [sum(part.numel() for part in line) for line in parts], [sum(line) for line in sizes]
        received = like.new_empty(sum(incoming))
        with waits.on(waits.collective, "all_to_all", sent, self._group):
            dist.all_to_all_single(received, sent, incoming, outgoing, group=self._group)
        return [list(block.split(line)) for block, line in zip(received.split(incoming), sizes, strict=True)]


def _numbers(piece: Piece) -> tuple[Tensor, Tensor]:
    assert piece.update.grad is not None
    return piece.update.data, piece.update.grad


def _dtypes(members: Sequence[tuple[Matrix, Piece]]) -> list[torch.dtype]:
    return list(dict.fromkeys(piece.update.dtype for _, piece in members))


def _assemble(matrix: Matrix, flat: Sequence[Tensor]) -> Tensor:
    """The whole from the flattened slices of all ranks."""
    whole = flat[0].new_empty(matrix.slices[0].global_shape)
    for spec, part in zip(matrix.slices, flat, strict=True):
        spec.write_into(whole, part.view(spec.local_shape))
    return whole
