"""What a rehearsed rank would have heard from the stage before it.

The first message between two stages says which tensors will follow: shapes, types, whether a gradient comes back.
Nobody sends it in a rehearsal, but this rank can find it out. Its own copy of the user's step, run with stand-ins up
to the call of its first layer, sees the arguments that the previous stage sees there::

    stage 37   ... layer 75 │ call of layer 76: (hidden, mask)  ──▶  "[1, 2048, 25600] float32, with gradient"
    stage 38   stand-ins    │ call of layer 76: (zeros, mask)        the same, found here
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.watch.failure import FailureWatch
from lightning_megatron.pipeline.elsewhere.twins import shown_whole
from lightning_megatron.pipeline.run.executor import PipelineExecutor
from lightning_megatron.pipeline.run.links import StageLinks
from lightning_megatron.pipeline.run.program import Slot
from lightning_megatron.pipeline.stage.boundary import Boundary, Leaf
from lightning_megatron.pipeline.stage.cursor import StageDone
from lightning_megatron.strategy.world import World
from lightning_megatron.tools.rehearsal.weightless import Weightless


class _NoWatch(FailureWatch):
    """Nobody else can fail, and nobody waits for news of this rank."""

    def start(self) -> None:
        """Look for nothing."""

    def linger(self, seconds: float = 0.0) -> None:
        """Wait for nobody."""

    def remote(self, wait_s: float = 0.0) -> None:
        """Nobody failed."""

    def gather(self, seconds: float) -> bool:
        """There is nobody to wait for."""
        return True


class _PaperLinks(StageLinks):
    """Links to stages that do not exist, and would have loaded the same batch."""

    def compare_notes(self, stage: int, mine: list[float]) -> list[float] | None:
        """The notes of the stage before are this stage's own."""
        return None if super().compare_notes(stage, mine) is None else mine


class _PaperExecutor(PipelineExecutor):
    """Learns by itself what the stage before would have told."""

    def announced(self, slot: Slot) -> tuple[Leaf, ...]:
        """Receive buffers of the sizes that the message would have, and return what it would say."""
        leaves = _leaves(self, slot)
        for length, dtype in ((1, torch.int64), (objects.encode(leaves).numel(), torch.uint8)):
            self._links.receive(slot.peer, [((length,), dtype)], slot.tag).wait()
        return leaves


class PaperWorld(World):
    """A world of which only this rank exists, and in which weights need no memory.

    Args:
        mode: makes tensors weightless.
    """

    def __init__(self, mode: Weightless) -> None:
        super().__init__()
        self._mode = mode

    def watch(self, *args: Any, **kwargs: Any) -> FailureWatch:
        """Nobody can fail."""
        return _NoWatch(*args, **kwargs)

    def materialize(self, module: nn.Module, *args: Any) -> None:
        """Give memory as in a launch, so that errors are the same, and take it back."""
        super().materialize(module, *args)
        self._mode.weightless(module)

    def links(self, mesh: ParallelMesh, device: torch.device, replicas: Any) -> StageLinks:
        """Links that the process group writes down."""
        group = mesh.group("pipeline_parallel")
        return _PaperLinks(group, mesh.pipeline_ranks, device, replicas, self.link_options)

    def executor(self, *args: Any) -> PipelineExecutor:
        """One that needs to be told nothing."""
        return _PaperExecutor(*args)


def _leaves(executor: PipelineExecutor, slot: Slot) -> tuple[Leaf, ...]:
    """Tensors that arrive at the first layer of a virtual stage."""
    step = executor._step
    stage: Any = executor._stage
    first = stage.partition.bounds[slot.virtual][0]
    stage.cursor.begin((first, first), slot.micro_batch, Boundary(), step.name)
    try:
        step.call(step.micro_batches[slot.micro_batch], slot.micro_batch)
    except StageDone:
        leaves = stage.cursor.sent.leaves
    finally:
        stage.cursor.end()
    if step.training and _trains_before(executor, slot.virtual):
        return leaves
    return tuple(replace(leaf, requires_grad=False) for leaf in leaves)


def _trains_before(executor: PipelineExecutor, virtual: int) -> bool:
    """Whether any parameter on the way to a virtual stage is trained, so that its input has a gradient."""
    stage: Any = executor._stage
    partition = stage.partition
    later = {*partition.trunk.layer_names[partition.bounds[virtual][0] :], *partition.after}
    with shown_whole(stage.module, stage.presence):
        trained = [name for name, parameter in stage.module.named_parameters() if parameter.requires_grad]
    parts = [stage.presence.part_of(name) for name in trained]
    return any(part is None or part.name not in later for part in parts)
