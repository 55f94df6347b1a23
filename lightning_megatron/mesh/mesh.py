"""Process groups of a layout, as a torch ``DeviceMesh``.

Code that needs a mesh takes it as an argument; no module of this package keeps a group in a module-level variable.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_megatron.mesh.layout import Coordinates, Layout

MESH_AXES = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")
"""Mesh dimension names, outermost first; Lightning's own names where it has them."""


class Holders(NamedTuple):
    """The ranks that hold a parameter.

    Attributes:
        stages: the stages that hold it, sorted.
        over_tensor: whether all its tensor-parallel ranks hold it, each with a partial sum of the gradient.
        of_experts: whether it belongs to experts, which a part of a stage's ranks holds; see :class:`ExpertGroups`.
    """

    stages: tuple[int, ...]
    over_tensor: bool
    of_experts: bool = False

    @property
    def are_replicas(self) -> bool:
        """Whether they are the replicas of one stage, and no others."""
        return len(self.stages) < 2 and not (self.over_tensor or self.of_experts)


class ExpertGroups(NamedTuple):
    """The ranks of a stage, seen by experts that are shared out over some of them.

    A second view of the same ranks, not an axis of the grid. Two replicas of two tensor ranks each::

        replica            0  0  1  1
        tensor rank        0  1  0  1
        two expert ranks
        group             [0  1][2  3]     together they hold all experts, and send each other tokens
        copies            [0  2][1  3]     hold the same experts, and sum their gradients
        four expert ranks
        group             [0  1  2  3]     one copy

    Attributes:
        group: the ranks that share out the experts; neighbours, in a process group of their own.
        rank: this rank's place in it.
        copies: the ranks with the same experts; ``None`` if there is one copy.
        together: the fewest neighbours that hold whole groups and whole tensor groups.
        tensor: the ranks of one replica that have the same tokens; ``None`` for one.
    """

    group: dist.ProcessGroup
    rank: int
    copies: dist.ProcessGroup | None
    together: dist.ProcessGroup
    tensor: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """How many ranks share out the experts."""
        return self.group.size()

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank's experts are those that count, of all copies."""
        return self.copies is None or self.copies.rank() == 0


@dataclass(frozen=True)
class ParallelMesh:
    """The grid as process groups, seen from this rank.

    The axes are pipeline × data × context × tensor, tensor fastest: ranks of a tensor group have consecutive global
    ranks, so that they share a node (SC21, section 3.1). Every rank is in exactly one group per axis, also along axes
    of size 1.

    ``DeviceMesh`` coordinates along ``"pipeline_parallel"`` grow with the global rank, so mesh coordinate 0 is the last
    stage (see :class:`~lightning_megatron.mesh.layout.Layout`), while ``pipeline_ranks`` is in stage order.
    """

    layout: Layout
    rank: int
    device_mesh: DeviceMesh
    _groups: dict[str, dist.ProcessGroup] = field(default_factory=dict, repr=False, compare=False)
    _experts: dict[int, ExpertGroups] = field(default_factory=dict, repr=False, compare=False)
    _levels: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place in the grid."""
        return self.layout.coordinates(self.rank)

    @functools.cached_property
    def of_gradients(self) -> ParallelMesh:
        """The same ranks, of which those of one context group count as replicas of their own.

        Gradients are averaged over data × context, and optimizers sharded over both. Context ranks lie inside of the
        data axis, so this is the grid of ``data * context`` replicas, rank by rank. Collective over the world when
        first asked for, where there are context ranks.
        """
        layout = self.layout
        if layout.context == 1:
            return self
        flat = replace(layout, context=1, data=layout.data * layout.context)
        return build_mesh(flat, self.device_mesh.device_type)

    @functools.cached_property
    def sharing_a_batch(self) -> dist.ProcessGroup | None:
        """Ranks of this stage that compute the same loss of the same batch: context × tensor; ``None`` for one rank.

        Collective over the world when first asked for.
        """
        layout = self.layout
        if layout.context == 1 or layout.tensor == 1:
            axis = "context_parallel" if layout.context > 1 else "tensor_parallel"
            return self.group(axis) if layout.context * layout.tensor > 1 else None
        blocks = torch.arange(layout.world_size).view(-1, layout.context * layout.tensor).tolist()
        group, _ = dist.new_subgroups_by_enumeration(blocks)
        return cast("dist.ProcessGroup", group)

    def context_levels(self, size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
        """Blocks of ``size`` neighbouring context ranks, and the ranks in the same place in every block.

        Four context ranks, alone or beside one of two tensor ranks, in blocks of two::

            context rank   0  1  2  3          tensor rank 0: rank   0  2  4  6
            block         [0  1][2  3]                              [0  2][4  6]
            same place    [0  2][1  3]                              [0  4][2  6]

        Returns:
            This rank's group of either kind; ``None`` where one block has all. Collective over the world when first
            asked for.
        """
        layout = self.layout
        if size == layout.context:
            return None
        if size not in self._levels:
            ranks = torch.arange(layout.world_size).view(-1, layout.context // size, size, layout.tensor)
            inner, _ = dist.new_subgroups_by_enumeration(ranks.movedim(2, -1).reshape(-1, size).tolist())
            outer, _ = dist.new_subgroups_by_enumeration(ranks.movedim(1, -1).reshape(-1, ranks.shape[1]).tolist())
            self._levels[size] = inner, outer
        return self._levels[size]

    def expert_groups(self, size: int) -> ExpertGroups | None:
        """The ranks of this stage with experts distributed over ``size`` of them; ``None`` for one.

        Collective over the world when first asked for.
        """
        if size == 1:
            return None
        if size not in self._experts:
            layout = self.layout
            ranks = torch.arange(layout.world_size).view(layout.pipeline, -1, size)
            group, _ = dist.new_subgroups_by_enumeration(ranks.reshape(-1, size).tolist())
            copies = None
            if ranks.shape[1] > 1:
                copies, _ = dist.new_subgroups_by_enumeration(ranks.mT.reshape(-1, ranks.shape[1]).tolist())
            tensor = self.group("tensor_parallel") if layout.tensor > 1 else None
            block = math.lcm(size, layout.tensor)
            together = group if block == size else tensor if block == layout.tensor else None
            if together is None:
                blocks = torch.arange(layout.world_size).view(-1, block).tolist()
                together, _ = dist.new_subgroups_by_enumeration(blocks)
            self._experts[size] = ExpertGroups(group, group.rank(), copies, together, tensor)
        return self._experts[size]

    @property
    def stage(self) -> int:
        """This rank's pipeline stage, 0 for the first."""
        return self.coordinates.pipeline

    @property
    def pipeline_ranks(self) -> list[int]:
        """Global ranks of this rank's pipeline, first stage first."""
        return self.layout.pipeline_ranks(self.rank)

    @property
    def loss_rank(self) -> int:
        """Global rank of this pipeline that computes the loss: the one with the lowest global rank."""
        ranks = self.pipeline_ranks
        return ranks[-1] if self.layout.last_stage_first else ranks[0]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Process group of this rank along ``axis``: one of ``MESH_AXES``, or ``"world"`` for all ranks."""
        if axis not in self._groups:  # DeviceMesh builds a submesh on every look-up
            self._groups[axis] = self.device_mesh[axis].get_group()
        return self._groups[axis]

    def holder_groups(self, holders: Iterable[Holders], experts: int = 1) -> dict[Holders, dist.ProcessGroup | None]:
        """Groups over which gradients of shared parameters are summed, besides the data-parallel group.

        Collective over the world: every rank must call this with the same holders.

        Args:
            holders: one entry per set of ranks that hold a parameter.
            experts: ranks of a stage over which experts are distributed.

        Returns:
            Holders -> group, for the groups of this rank. A group spans all data and context ranks on those stages, and
            all tensor ranks if ``over_tensor``, else only this tensor coordinate. Of experts it spans the ranks with
            the same ones; ``None`` if this is the only one.
        """
        mine: dict[Holders, dist.ProcessGroup | None] = {}
        of_experts = self.expert_groups(experts)
        if of_experts is not None:
            mine[Holders((self.stage,), False, True)] = of_experts.copies
        singles = sorted({holder for holder in holders if len(holder.stages) == 1 and holder.over_tensor})
        together = [singles] if singles else []
        together += [[holder] for holder in sorted(set(holders)) if len(holder.stages) > 1]
        for members in together:
            ranks = [block for holder in members for block in self._holder_ranks(holder, experts)]
            group, _ = dist.new_subgroups_by_enumeration(ranks)
            for holder in members:
                if any(self.rank in block for block in self._holder_ranks(holder, experts)):
                    mine[holder] = group
        return mine

    def _holder_ranks(self, holder: Holders, experts: int) -> list[list[int]]:
        """Ranks of each group for ``holder``: one group, or one per tensor coordinate, or per set of experts."""
        layout = self.layout
        if holder.of_experts:
            size = layout.world_size // layout.pipeline
            starts = [layout.rank(pipeline=stage) for stage in sorted(holder.stages)]
            held = sorted(start + place for start in starts for place in range(size))
            return [[rank for rank in held if rank % experts == own] for own in range(experts)]
        places = [(s, d, c) for s in holder.stages for d in range(layout.data) for c in range(layout.context)]
        by_tensor = [
            [layout.rank(tensor=t, context=c, data=d, pipeline=s) for s, d, c in places] for t in range(layout.tensor)
        ]
        if not holder.over_tensor:
            return [sorted(block) for block in by_tensor]
        return [sorted(rank for block in by_tensor for rank in block)]


def build_mesh(layout: Layout, device_type: str) -> ParallelMesh:
    """Create the process groups of ``layout``; collective over the world.

    Args:
        layout: axis sizes; their product is the world size.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    sizes = (layout.pipeline, layout.data, layout.context, layout.tensor)
    if device_type == "cuda":
        torch.cuda.current_device()
    if device_type != "cpu":
        device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=MESH_AXES)
        return _mesh(layout, device_mesh)
    ranks = torch.arange(layout.world_size).view(sizes)
    device_mesh = DeviceMesh.from_group(_groups_of(ranks), device_type, ranks, mesh_dim_names=MESH_AXES)
    return _mesh(layout, device_mesh)


def _mesh(layout: Layout, device_mesh: DeviceMesh) -> ParallelMesh:
    """Make the mesh; it keeps the group of the world, which is not the default group inside the user's step."""
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    return ParallelMesh(layout, dist.get_rank(), device_mesh, {"world": world})


def _groups_of(ranks: Tensor) -> list[dist.ProcessGroup]:
    """This rank's group along each axis of the grid of ``ranks``; collective over the world.

    Axes of size one share a group, as every gloo group has a thread that wakes up a hundred times a second.
    """
    alone: dist.ProcessGroup | None = None
    groups: list[dist.ProcessGroup] = []
    for axis, size in enumerate(ranks.shape):
        if size == ranks.numel() > 1:
            group = dist.group.WORLD
        elif size > 1:
            group, _ = dist.new_subgroups_by_enumeration(ranks.movedim(axis, -1).reshape(-1, size).tolist())
        else:
            alone = alone or dist.new_group([dist.get_rank()], use_local_synchronization=True)
            group = alone
        assert group is not None
        groups.append(group)
    return groups
