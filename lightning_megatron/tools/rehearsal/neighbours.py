"""What a rehearsed rank would have heard from the stage before it.

The first message between two stages says which tensors will follow: shapes, types, whether a gradient comes back.
Nobody sends it in a rehearsal, but this rank can find it out. Its own copy of the user's step, run with stand-ins up
to the call of its first layer, sees the arguments that the previous stage sees there::

    stage 37   ... layer 75 │ call of layer 76: (hidden, mask)  ──▶  "[1, 2048, 25600] float32, with gradient"
    stage 38   stand-ins    │ call of layer 76: (zeros, mask)        the same, found here
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.watch.failure import FailureWatch
from lightning_megatron.pipeline.elsewhere.twins import shown_whole
from lightning_megatron.pipeline.run.executor import PipelineExecutor
from lightning_megatron.pipeline.run.links import StageLinks
from lightning_megatron.pipeline.run.program import Slot
from lightning_megatron.pipeline.stage.boundary import Boundary, Leaf
from lightning_megatron.pipeline.stage.cursor import StageDone
from lightning_megatron.strategy import processes as grid_strategy
from lightning_megatron.strategy.step import assembly
from lightning_megatron.tools.rehearsal.weightless import Weightless, apply_in_place

_compare_notes = StageLinks.compare_notes
_post_forward = PipelineExecutor._post_forward
_materialize = assembly.materialize


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


@contextmanager
def imagined_neighbours(mode: Weightless) -> Iterator[None]:
    """While active, this rank does without the others, and without numbers.

    Stages learn by themselves what the previous stage would have told them, nobody watches for failures of others,
    and weights lose their memory once the module has been divided.

    Args:
        mode: makes tensors weightless.
    """

    def materialize(module: torch.nn.Module, *arguments: Any) -> None:
        _materialize(module, *arguments)
        mode.weightless(module)

    with (
        patch.object(assembly, "materialize", materialize),
        patch.object(PipelineExecutor, "_post_forward", _post_after_asking),
        patch.object(StageLinks, "receive_object", _receive_expected),
        patch.object(StageLinks, "compare_notes", _same_notes),
        patch.object(grid_strategy, "FailureWatch", _NoWatch),
        patch.object(torch.nn.Module, "_apply", apply_in_place),
    ):
        yield


def _post_after_asking(executor: PipelineExecutor, slot: Slot) -> None:
    links: Any = executor._links
    if executor._variable_shapes or executor._key(slot, slot.virtual) not in executor._received_leaves:
        links.expected = _leaves(executor, slot)
    _post_forward(executor, slot)


def _receive_expected(links: Any, stage: int, tag: int) -> Any:
    """Receive buffers of the sizes that the message would have, and return what it would say."""
    size = objects.encode(links.expected).numel()
    for length, dtype in ((1, torch.int64), (size, torch.uint8)):
        links.receive(stage, [((length,), dtype)], tag).wait()
    return links.expected


def _same_notes(links: StageLinks, stage: int, mine: list[float]) -> list[float] | None:
    """The stage before loaded the same batch."""
    return None if _compare_notes(links, stage, mine) is None else mine


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
