"""Local tensors of a tensor-parallel or expert rank, and the logical tensors they are parts of.

Checkpoints, exported states and summaries speak of logical tensors: unsplit, unpadded. This module translates, by
the table that sharding left behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.layers.table import ShardTable
from lightning_megatron.layers.whole.parameter_parts import ParameterParts
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import raw_broadcast
from lightning_megatron.mesh.parts.boxes import ShardSpec, assemble
from lightning_megatron.mesh.parts.pieces import PiecedTensor


class _Shares(NamedTuple):
    """The slices that the ranks of one group hold of the parameters that are split over it.

    Attributes:
        group: the ranks.
        rank: this one's place among them.
        everyone: of each rank, parameter name -> its part.
    """

    group: Any
    rank: int
    everyone: list[dict[str, ShardSpec]]


class TensorState:
    """Translates between this rank's slices of parameters and the logical tensors of the user's module.

    A logical tensor has the global shape that the module's author wrote; a slice is what one rank of the tensor group
    holds of it, or of experts one rank of the expert group. Invariants: the slices of a group cover the logical tensor,
    each element once unless the entry is replicated; padding is never part of a logical tensor. Building one is
    collective over these groups.

    Args:
        table: parameter name -> how this rank holds it; empty where nothing is split.
        group: the tensor group; ``None`` for one rank.
        experts: the expert group; ``None`` for one rank.
    """

    def __init__(self, table: ShardTable | None = None, group: Any = None, experts: Any = None) -> None:
        self.table: ShardTable = table or {}
        self.group, self.expert_group = group, experts
        self._split = {name: entry.spec for name, entry in self.table.items() if not entry.replicated}
        self._shares = {of_experts: self._share(of_experts) for of_experts in (False, True)}
        self.rank = self._shares[False].rank

    def _share(self, of_experts: bool) -> _Shares:
        group = self.expert_group if of_experts else self.group
        own = {name: spec for name, spec in self._split.items() if self.table[name].of_experts == of_experts}
        return _Shares(None, 0, [own]) if group is None else _Shares(group, group.rank(), objects.gather(own, group))

    def _shares_of(self, name: str) -> _Shares:
        return self._shares[self.table[name].of_experts]

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
        """The logical tensor; collective over the group that it is split over, on every rank of it."""
        if not self._is_part(name, local):
            return local
        own, shares, pieces = local.detach().contiguous(), self._shares_of(name), []
        for rank, specs in enumerate(shares.everyone):
            here = rank == shares.rank
            piece = own if here else torch.empty(specs[name].local_shape, dtype=own.dtype, device=own.device)
            if piece.numel():
                raw_broadcast(piece, dist.get_global_rank(shares.group, rank), shares.group)
            pieces.append(piece)
        return assemble([specs[name] for specs in shares.everyone], [piece.cpu() for piece in pieces])

    def to_local(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of a logical tensor; anything else is returned as it is."""
        spec = self._split.get(name)
        if spec is None or tuple(value.shape) != spec.global_shape:
            return value
        return spec.slice_full(value)

    def logical_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A module's state with logical tensors; ranks other than the first of a group drop what is split over it."""
        if self.is_trivial:
            return dict(state)
        logical: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and self._is_part(name, value):
                whole = self.to_logical(name, value)
                if self._shares_of(name).rank != 0:
                    continue
                value = whole
            logical[name] = value
        return logical

    def slices_of(self, name: str) -> tuple[ShardSpec, ...] | None:
        """The slice of a parameter that each rank of its group holds; ``None`` if each has all of it."""
        return tuple(specs[name] for specs in self._shares_of(name).everyone) if name in self._split else None

    def parts_of(self, name: str) -> ParameterParts | None:
        """How a parameter is split, for those who put it together; ``None`` if every rank has all of it."""
        specs = self.slices_of(name)
        if specs is None:
            return None
        same_loss = None if not self.table[name].of_experts else 1 if self.group is None else self.group.size()
        return ParameterParts(name, specs, self._shares_of(name).group, same_loss)

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
