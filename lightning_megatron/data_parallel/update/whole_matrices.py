"""Assembles matrices from the slices of tensor-parallel ranks, for optimizers that need them whole.

Muon orthogonalizes a matrix, and Adafactor uses its row and column means: neither can step on a slice. One rank of the
tensor group owns each such parameter. The owner receives all slices of weight and gradient, updates the whole matrix,
and sends the slices of the new weight back. Only the owner keeps the optimizer's state::

                     slices            all-to-all                    all-to-all
    tensor rank 0    a0 b0 c0    →     a0 a1 c0 c1    update a, c    →    a0 b0 c0
    tensor rank 1    a1 b1 c1    →     b0 b1          update b       →    a1 b1 c1

One message per dtype carries all parameters in each direction. Parameters that are replicated over the tensor group are
updated by every rank of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.checkpoints.state.stored import parameter_names
from lightning_megatron.data_parallel.buckets.bucket import Piece
from lightning_megatron.data_parallel.buckets.buckets import GradientBuckets
from lightning_megatron.mesh.parts.boxes import ShardSpec
from lightning_megatron.mesh.watch import waits

Slices = tuple[ShardSpec, ...]
"""The slice of one parameter on each rank of the tensor group."""


@dataclass(frozen=True)
class Matrix:
    """A split parameter that is assembled for its update.

    Attributes:
        slices: the slice on each rank of the tensor group.
        owner: the rank of the tensor group that updates it.
        update: the parameter of global shape that the owner's optimizer updates; it has storage during an update only.
    """

    slices: Slices
    owner: int
    update: nn.Parameter

    @property
    def spec(self) -> ShardSpec:
        """The logical parameter as one unsplit tensor."""
        return ShardSpec.whole(self.slices[0].global_shape)


class WholeMatrices:
    """The split parameters of one optimizer.

    Args:
        group: the tensor group.
        slices_of: parameter -> its slices over the tensor group; ``None`` if every rank has all of it.
    """

    def __init__(self, group: Any, slices_of: Callable[[nn.Parameter], Slices | None]) -> None:
        self._group, self._slices_of = group, slices_of
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._matrices: dict[int, Matrix] = {}
        self._loads = [0] * self._size
        self._gathered: list[tuple[Matrix, Piece]] = []

    def matrix_of(self, parameter: nn.Parameter) -> Matrix | None:
        """The matrix of a parameter; ``None`` if the parameter is not split.

        A new matrix is given to the rank that owns the fewest elements so far, so all ranks of the tensor group must
        ask for parameters in the same order.
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
        """Send weights and gradients to the owners (all-to-all); collective over the tensor group.

        Args:
            pieces: this rank's pieces of all parameters to update, in the same order on all ranks.
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
        """Send slices of the updated weights back (all-to-all); collective over the tensor group."""
        gathered, self._gathered = self._gathered, []
        for dtype in _dtypes(gathered):
            chosen = [(matrix, piece) for matrix, piece in gathered if piece.update.dtype == dtype]
            own = [matrix for matrix, _ in chosen if self.owns(matrix)]
            parts = [[m.slices[rank].slice_full(m.update.data) for m in own] for rank in range(self._size)]
            sizes = [[p.update.numel() for m, p in chosen if m.owner == rank] for rank in range(self._size)]
            received = self._exchange(parts, sizes, chosen[0][1].update.data)
            for rank, line in enumerate(received):
                for (matrix, piece), part in zip([e for e in chosen if e[0].owner == rank], line, strict=True):
                    for box in matrix.slices[self._rank].boxes:  # padding keeps its values
                        box.of_local(piece.update.data).copy_(box.of_local(part))
        self.release()

    def release(self) -> None:
        """Free the assembled matrices and their gradients."""
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
    """The matrix of global shape, from the flattened slices of all ranks of the tensor group."""
    whole = flat[0].new_empty(matrix.slices[0].global_shape)
    for spec, part in zip(matrix.slices, flat, strict=True):
        spec.write_into(whole, part.view(spec.local_shape))
    return whole


def whole_matrices(module: nn.Module, group: Any, tensor: TensorState, buckets: GradientBuckets) -> WholeMatrices:
    """Owners for the split parameters in ``buckets``; collective over the tensor group.

    Args:
        module: the user's module, already cut if there are several stages.
        group: the tensor group.
        tensor: puts together what is split over it.
        buckets: the parameters of this rank, and the pieces it updates.
    """
    names = parameter_names(module)

    def slices_of(parameter: nn.Parameter) -> Slices | None:
        return tensor.slices_of(names[id(parameter)]) if id(parameter) in names else None

    pieces = [(bucket.parameters[index], piece) for bucket in buckets.buckets for index, piece in bucket.pieces.items()]
    tensor.check_agreement([piece.name for parameter, piece in pieces if slices_of(parameter) is not None])
    wholes = WholeMatrices(group, slices_of)
    for parameter, _ in pieces:
        wholes.matrix_of(parameter)
    return wholes
