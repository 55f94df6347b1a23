"""Replaces the first message of the previous stage, which does not exist in a rehearsal.

The first message between two stages announces the tensors of the boundary: their shapes and dtypes, and whether a
gradient is returned. In a rehearsal no stage sends it, so this rank computes it. It runs the user's step with stand-ins
up to the call of its first layer, where it sees the same arguments as the previous stage would; where context ranks
share the tokens out, it cuts them as the first of all layers does::

    stage 37   ... layer 75 │ call of layer 76: (hidden, mask)  ──▶  "[1, 2048, 25600] float32, with gradient"
    stage 38   stand-ins    │ call of layer 76: (zeros, mask)        the same, found here
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.checkpoints.loading.as_built import allocate_as_built
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.watch.failure import FailureWatch
from lightning_megatron.pipeline.elsewhere.away import unmarked
from lightning_megatron.pipeline.elsewhere.twins import shown_whole
from lightning_megatron.pipeline.run.executor import PipelineExecutor
from lightning_megatron.pipeline.run.links import StageLinks
from lightning_megatron.pipeline.run.program import Slot
from lightning_megatron.pipeline.stage.boundary import Announcement, Boundary, Leaf
from lightning_megatron.pipeline.stage.order import StageDone
from lightning_megatron.strategy.assembly.alike import materialize
from lightning_megatron.strategy.world import World
from lightning_megatron.tools.rehearsal.paper_host import PaperHost
from lightning_megatron.tools.rehearsal.weightless import Weightless


class _NoWatch(FailureWatch):
    """A failure watch without other ranks."""

    def start(self) -> None:
        """Do nothing."""

    def linger(self, seconds: float = 0.0) -> None:
        """Do not wait."""

    def remote(self, wait_s: float = 0.0) -> None:
        """Report no failure."""

    def end_loop(self, kind: str, count: int | None = None) -> None:
        """Nobody's loop ends at another time."""

    def gather(self, seconds: float) -> bool:
        """Return at once: there are no other ranks."""
        return True


class _PaperLinks(StageLinks):
    """Links to stages that do not exist, and are assumed to have the same batch."""

    def compare_notes(self, stage: int, mine: list[float]) -> list[float] | None:
        """Return this stage's own notes in place of the previous stage's."""
        return None if super().compare_notes(stage, mine) is None else mine

    def hear_last(self, stage: int, mine: float) -> float:
        """Return this stage's own number in place of the last stage's."""
        super().hear_last(stage, mine)
        return mine


class _PaperExecutor(PipelineExecutor):
    """Executor that computes the first message of the previous stage itself."""

    def announced(self, slot: Slot) -> Announcement:
        """Record receives of the message's sizes, and return its content."""
        told = _told(self, slot)
        for length, dtype in ((1, torch.int64), (objects.encode(told).numel(), torch.uint8)):
            self.links.receive(slot.peer, [((length,), dtype)], slot.tag).wait()
        return told


class PaperWorld(World):
    """World of a rehearsal: only this rank exists, and weights take no memory.

    Args:
        mode: replaces large tensors by fake ones.
        host: memory for activations.
    """

    def __init__(self, mode: Weightless, host: PaperHost) -> None:
        super().__init__(host=host)
        self._mode = mode

    @property
    def compares(self) -> bool:
        """Nobody else has a batch."""
        return False

    def watch(self, *args: Any, **kwargs: Any) -> FailureWatch:
        """Make a failure watch without other ranks."""
        return _NoWatch(*args, **kwargs)

    def materialize(
        self,
        module: nn.Module,
        device: torch.device,
        seed: int,
        table: Any,
        settle: Any | None = None,
        hidden: Collection[str] = (),
    ) -> None:
        """Materialize the parameters as in a launch, for the same errors, and then free their memory."""
        allocate_as_built(module, device, seed, table)
        materialize(module, device, seed, table, settle)
        self._mode.weightless(module)

    def links(self, mesh: ParallelMesh, device: torch.device, replicas: Any) -> StageLinks:
        """Make links whose messages go to the ledger of the process group."""
        group = mesh.group("pipeline_parallel")
        return _PaperLinks(group, mesh.pipeline_ranks, device, replicas, self.link_options)

    def executor(self, *args: Any) -> PipelineExecutor:
        """Make an executor that does not need the first message of the previous stage."""
        return _PaperExecutor(*args)


def _told(executor: PipelineExecutor, slot: Slot) -> Announcement:
    """Describe what the first layer of a virtual stage receives."""
    step = executor.step
    stage: Any = executor.stage
    first = stage.partition.bounds[slot.virtual][0]
    stage.cursor.begin((first, first), slot.micro_batch, Boundary(), step.name)
    try:
        with unmarked():  # small stand-ins have memory, and would be refused as arguments of this stage's layers
            step.call(step.micro_batches[slot.micro_batch], slot.micro_batch)
    except StageDone:
        sent = stage.cursor.sent
    finally:
        stage.cursor.end()
    leaves = sent.leaves if stage.cursor.tokens is None else _in_rows(stage, sent)
    if not (step.training and _trains_before(executor, slot.virtual)):
        leaves = tuple(replace(leaf, requires_grad=False) for leaf in leaves)
    return Announcement(leaves, forms=sent.forms)


def _in_rows(stage: Any, sent: Boundary) -> tuple[Leaf, ...]:
    """Leaves of a boundary whose tokens are split: of those shaped like the hidden state, this rank's rows.

    The layers before cut what the first of them is given. They are not run here, so what they pass on is whole.
    """
    layer, hidden = stage.partition.trunk.layers(stage.module)[0], sent.tensors[0]
    with torch.no_grad():
        rows, described = stage.cursor.tokens.parted(stage.cursor.tokens.cut_at(layer, hidden))
    dims = hidden.ndim - 1

    def cut(leaf: Leaf, tensor: Tensor) -> Leaf:
        if not tensor.is_floating_point() or leaf.index < 0 or tensor.shape[:dims] != hidden.shape[:dims]:
            return leaf
        return replace(leaf, shape=(*rows.shape[:dims], *leaf.shape[dims:]), tokens=described)

    return tuple(map(cut, sent.leaves, sent.tensors))


def _trains_before(executor: PipelineExecutor, virtual: int) -> bool:
    """Whether any parameter before a virtual stage is trained, so that the stage's input has a gradient."""
    stage: Any = executor.stage
    partition = stage.partition
    later = {*partition.trunk.layer_names[partition.bounds[virtual][0] :], *partition.after}
    with shown_whole(stage.module, stage.presence):
        trained = [name for name, parameter in stage.module.named_parameters() if parameter.requires_grad]
    parts = [stage.presence.part_of(name) for name in trained]
    return any(part is None or part.name not in later for part in parts)
