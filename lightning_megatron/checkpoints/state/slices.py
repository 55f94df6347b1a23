"""Local tensors of a tensor-parallel or expert rank, and the logical tensors they are parts of.

Checkpoints, exported states and summaries speak of logical tensors: unsplit, unpadded. This module translates, by
the table that sharding left behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.layers.table import ShardTable
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import raw_broadcast
from lightning_megatron.mesh.parts.boxes import ShardSpec, assemble
from lightning_megatron.mesh.parts.pieces import PiecedTensor


class TensorState:
    """Translates between this rank's slices of parameters and the logical tensors of the user's module.

    A logical tensor has the global shape that the module's author wrote; a slice is what one rank of the tensor group
    holds of it. Invariants: the slices of a group cover the logical tensor, each element once unless the entry is
    replicated; padding is never part of a logical tensor. Building one is collective over the tensor group.

    Args:
        table: parameter name -> how this rank holds it; empty without tensor parallelism.
        group: the tensor group, or the expert group; ``None`` where nothing is split.
    """

    def __init__(self, table: ShardTable | None = None, group: Any = None) -> None:
        self.table: ShardTable = table or {}
        self.group = group
        self._split = {name: entry.spec for name, entry in self.table.items() if not entry.replicated}
        self._everyone: list[dict[str, ShardSpec]] = [self._split]
        self.rank = 0
        if group is not None:
            self.rank = dist.get_rank(group)
            self._everyone = objects.gather(self._split, group)

    @property
    def is_trivial(self) -> bool:
        """Whether every local tensor is the logical one."""
        return not self._split

    @property
    def sums_gradients(self) -> bool:
        """Whether there is a parameter whose gradient must be summed over the tensor group."""
        return any(entry.sums_gradient for entry in self.table.values())

    def logical_shape(self, name: str, local: Tensor) -> torch.Size:
        """Shape of the logical tensor that ``local``, of parameter ``name`` or its optimizer state, is part of."""
        return torch.Size(self._split[name].global_shape) if self._is_part(name, local) else local.shape

    def _is_part(self, name: str, local: Tensor) -> bool:
        return name in self._split and tuple(local.shape) == self._split[name].local_shape

    def to_logical(self, name: str, local: Tensor) -> Tensor:
        """The logical tensor; collective over the tensor group, on every rank of it."""
        if not self._is_part(name, local):
            return local
        own = local.detach().contiguous()
        pieces = []
        for rank, specs in enumerate(self._everyone):
            piece = (
                own if rank == self.rank else torch.empty(specs[name].local_shape, dtype=own.dtype, device=own.device)
            )
            if piece.numel():
                raw_broadcast(piece, dist.get_global_rank(self.group, rank), self.group)
            pieces.append(piece)
        return assemble([specs[name] for specs in self._everyone], [piece.cpu() for piece in pieces])

    def to_local(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of a logical tensor; anything else is returned as it is."""
        spec = self._split.get(name)
        if spec is None or tuple(value.shape) != spec.global_shape:
            return value
        return spec.slice_full(value)

    def logical_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A module's state with logical tensors; ranks other than the first of the group drop what is split."""
        if self.is_trivial:
            return dict(state)
        logical: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and self._is_part(name, value):
                whole = self.to_logical(name, value)
                if self.rank != 0:
                    continue
                value = whole
            logical[name] = value
        return logical

    def slices_of(self, name: str) -> tuple[ShardSpec, ...] | None:
        """What every rank of the tensor group holds of a parameter; ``None`` if each has all of it."""
        return tuple(specs[name] for specs in self._everyone) if name in self._split else None

    def check_agreement(self, names: list[str]) -> None:
        """Refuse parameters that lie elsewhere on other ranks of the tensor group; collective over it.

        Raises:
            RuntimeError: with the names of this rank and of another.
        """
        for rank, other in enumerate(objects.gather(names, self.group)):
            if other != names:
                raise RuntimeError(
                    f"an optimizer that needs whole matrices updates {names} here and {other} on tensor-parallel rank "
                    f"{rank}, because their slices differ in size; use a `tensor_parallel_size` that divides all heads."
                )

    def spec_of(self, name: str, shape: torch.Size) -> ShardSpec:
        """The part of logical parameter ``name`` that a local tensor of ``shape`` is."""
        spec = self._split.get(name)
        return spec if spec is not None and tuple(shape) == spec.local_shape else ShardSpec.whole(shape)

    def pieces(self, name: str, value: Any) -> Any:
        """A tensor that is split over the tensor group as pieces; anything else as it is."""
        if not isinstance(value, Tensor) or not self._is_part(name, value):
            return value
        return PiecedTensor(self._split[name], value.detach().contiguous())
