"""Process groups of a layout, as a torch ``DeviceMesh``.

A mesh is an argument wherever it is needed; nothing in this package keeps a group in a module-level variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_megatron.layout import Coordinates, Layout

MESH_AXES = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")
"""Mesh dimension names, outermost first; Lightning's own names where it has them."""


@dataclass(frozen=True)
class ParallelMesh:
    """The grid as process groups, seen from this rank.

    ``DeviceMesh`` coordinates along ``"pipeline_parallel"`` run with the global rank, so mesh coordinate 0 is the last
    stage (see :class:`~lightning_megatron.layout.Layout`). ``pipeline_ranks`` is in stage order and hides that.
    """

    layout: Layout
    rank: int
    device_mesh: DeviceMesh

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place in the grid."""
        return self.layout.coordinates(self.rank)

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
        """Global rank of this pipeline that computes the loss (the one in global rank 0's block)."""
        ranks = self.pipeline_ranks
        return ranks[-1] if self.layout.last_stage_first else ranks[0]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Process group of this rank along ``axis`` (one of ``MESH_AXES``)."""
        return self.device_mesh[axis].get_group()

    def groups_over_stages(
        self, stage_sets: Iterable[Sequence[int]], *, with_data: bool
    ) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Groups for parameters that several stages hold, e.g. a tied embedding on the first and the last.

        Every rank must call this with the same sets in the same order: creating a group is collective.

        Args:
            stage_sets: sets of stages; sets of one stage are skipped.
            with_data: whether a group spans all data (and context) replicas as well.

        Returns:
            The groups that this rank belongs to, keyed by the sorted set of stages.
        """
        mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
        layout = self.layout
        replicas = [(c, d) for d in range(layout.data) for c in range(layout.context)]
        for stages in sorted({tuple(sorted(set(stages))) for stages in stage_sets}):
            if len(stages) < 2:
                continue
            blocks = [replicas] if with_data else [[replica] for replica in replicas]
            ranks = [
                [layout.rank(tensor=t, context=c, data=d, pipeline=s) for s in stages for c, d in block]
                for block in blocks
                for t in range(layout.tensor)
            ]
            group, _ = dist.new_subgroups_by_enumeration([sorted(members) for members in ranks])
            if any(self.rank in members for members in ranks):
                mine[stages] = group
        return mine


def build_mesh(layout: Layout, device_type: str) -> ParallelMesh:
    """Create the process groups of ``layout``; collective over the world.

    Args:
        layout: axis sizes; their product is the world size.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    sizes = (layout.pipeline, layout.data, layout.context, layout.tensor)
    if device_type == "cuda":
        torch.cuda.current_device()
    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=MESH_AXES)
    return ParallelMesh(layout, dist.get_rank(), device_mesh)


def gather_rows(row: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Rows of all ranks of ``group``, in group order.

    Args:
        row: this rank's values, ``[n]``.
        size: ranks in the group.
        group: the group.

    Returns:
        ``[size, n]``, equal on every rank.
    """
    rows = torch.empty(size, row.numel(), dtype=row.dtype, device=row.device)
    dist.all_gather(list(rows.unbind()), row, group=group)
    return rows
