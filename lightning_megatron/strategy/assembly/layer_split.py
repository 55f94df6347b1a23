"""Layers split over tensor ranks, and experts shared out: once per module, and kept with it for later runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.data_parallel.presplit import splits_itself
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.mesh import ExpertGroups, ParallelMesh
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.elsewhere.twins import shown_whole
from lightning_megatron.pipeline.forwards.compiled import is_given_compiled
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.assembly.refusals import already_split

if TYPE_CHECKING:
    from lightning_megatron.experts.split import ExpertSplit
    from lightning_megatron.parallelize import ParallelReport


@dataclass(frozen=True)
class _Split:
    """How an earlier run split a module over tensor-parallel or expert ranks; kept with it, like the cut itself."""

    size: int
    state: TensorState
    report: ParallelReport | None
    experts: int = 1
    parts: int = 1
    dispatch: str = "all_to_all"
    expert_plan: str | Mapping[str, str | int] = "auto"

    def __deepcopy__(self, memo: Any) -> _Split:
        """The same: it tells of names and slices, and holds the group, which cannot be copied."""
        return self


def whole_view(module: pl.LightningModule) -> AbstractContextManager[None] | None:
    """Shows a module that this process has divided, in whichever run, as one process has it; ``None`` for others."""
    stage, split = Stage.of(module), Marks.of(module).get(_Split)
    if stage is not None:
        return shown_whole(module, stage.presence)
    if split is None or split.state.is_trivial:
        return None
    return shown_whole(module, Presence.uncut(module, split.state.table, split.state.rank))


@dataclass(frozen=True)
class LayerSplit:
    """Splits the layers of modules over the ranks of a stage.

    Args:
        mesh: the grid.
        precision: in whose context plans are tried.
        plan: how layers are split; see ``tensor_parallel_plan``.
        sequence_parallel: whether what is between the layers is split along the sequence too.
        experts: ranks that share out the experts of mixtures.
        parts: how many of them hold a part of each of the same experts.
        dispatch: how tokens come to experts: "all_to_all" or "all_gather".
        expert_plan: what the user says of experts; see ``expert_parallel_plan``.
        per_replica: whether a balancing loss is meant to be each replica's.
        by_views: whether nothing asked for keeps code in layers from being given sizes of one rank.
    """

    mesh: ParallelMesh
    precision: Precision
    plan: str | Mapping[str, str]
    sequence_parallel: bool
    experts: int
    parts: int
    dispatch: str
    expert_plan: str | Mapping[str, str | int]
    per_replica: bool
    by_views: bool

    def split(self, module: pl.LightningModule) -> tuple[TensorState, ParallelReport | None]:
        """Split the layers over the tensor group, by plan; an earlier run's split is kept."""
        tensor, experts = self.mesh.layout.tensor, self.experts
        earlier = Marks.of(module).get(_Split)
        if earlier is not None or Stage.of(module) is not None:
            before = (earlier.size, earlier.experts, earlier.parts) if earlier is not None else (1, 1, 1)
            if before[0] != tensor:
                raise RuntimeError(already_split("tensor_parallel_size", before[0], tensor))
            if before[1] // before[2] != experts // self.parts:
                raise RuntimeError(already_split("expert_parallel_size", before[1] // before[2], experts // self.parts))
            if before[2] != self.parts:
                raise RuntimeError(already_split("expert_tensor_parallel_size", before[2], self.parts))
            if earlier is not None and experts > 1 and earlier.dispatch != self.dispatch:
                raise RuntimeError(already_split("expert_dispatch", earlier.dispatch, self.dispatch))
            if earlier is not None and experts > 1 and earlier.expert_plan != self.expert_plan:
                raise RuntimeError(
                    already_split("expert_parallel_plan", str(earlier.expert_plan), str(self.expert_plan))
                )
        if (tensor == 1 and experts == 1) or splits_itself(module):
            return TensorState(), None
        if earlier is None:
            earlier = Marks.of(module).put(self._split_now(module, tensor, experts))
        return earlier.state, earlier.report

    def _split_now(self, module: pl.LightningModule, tensor: int, experts: int) -> _Split:
        """Share out experts, and split the layers around them over the tensor group."""
        groups, table, report = self.mesh.expert_groups(experts), {}, None
        split = self._find_experts(module, groups)
        group = self.mesh.group("tensor_parallel") if tensor > 1 else None
        if group is not None:
            from lightning_megatron.parallelize import parallelize

            with self.precision.forward_context():
                report = parallelize(
                    *(module, group, self.plan, self.sequence_parallel),
                    splits_input=self.mesh.layout.context == 1,
                    by_views=self.by_views and self.mesh.layout.context == 1 and not is_given_compiled(module),
                    whole=() if split is None else split.report.split,
                )
            table = report.parameters
        if split is not None and groups is not None:
            on_shards = () if report is None else report.partial_gradients
            table |= split.cut(groups, on_shards=on_shards).table
            cut = f", `expert_tensor_parallel_size={self.parts}`" if self.parts > 1 else ""
            rank_zero_info(f"`expert_parallel_size={experts // self.parts}`{cut}: {split.report.explain()}.")
        buffers = {} if report is None else report.buffers
        state = TensorState({**table, **buffers}, group, None if groups is None else groups.group)
        return _Split(tensor, state, report, experts, self.parts, self.dispatch, self.expert_plan)

    def _find_experts(self, module: pl.LightningModule, groups: ExpertGroups | None) -> ExpertSplit | None:
        """The experts that ranks are to share out; ``None`` if they are not to."""
        if groups is None:
            return None
        from lightning_megatron.experts.split import ExpertSplit

        with self.precision.forward_context():
            about: dict[str, Any] = {"per_replica": self.per_replica, "gathers": self.dispatch == "all_gather"}
            return ExpertSplit(module, groups.size // self.parts, self.parts, plan=self.expert_plan, **about)
