"""A module that is not cut, as the only stage of its pipeline.

It runs its micro-batches one after the other through the same executor as the stages of a cut module, and draws the
random numbers that they would draw: each segment of each micro-batch from a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.draws.segment_hooks import SegmentHooks
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.messages.joint_backwards import JointBackwards
from lightning_megatron.pipeline.cut.partition import parts_outside
from lightning_megatron.pipeline.cut.trunk import find_trunk
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.stage.boundary import Boundary, StageRun


class UncutModule:
    """The whole module as stage 0 of 1.

    Args:
        module: the user's module.
        streams: random streams per segment.
    """

    stage = 0
    schedule: Schedule | None = None
    leaves_out = False

    def __init__(self, module: nn.Module, streams: SegmentStreams) -> None:
        self._marks, self._streams = Marks.of(module), streams
        self._segments = _segments(module, streams)

    def run(
        self,
        virtual_stage: int,
        micro_batch: int,
        step: Callable[[Any, int], Any],
        batch: Any,
        received: Boundary,
        where: str,
        *,
        trunk_only: bool = False,
    ) -> StageRun:
        """Run the user's step on one micro-batch; its backward has to follow before the next one.

        Args:
            virtual_stage: always 0.
            micro_batch: its number in the step.
            step: the user's step, taking the micro-batch and its number.
            batch: the micro-batch.
            received: empty.
            where: name of the step.
            trunk_only: never, with one stage.
        """
        self.enter(micro_batch)
        joint = self._marks.get(JointBackwards)
        if joint is None:
            return StageRun(micro_batch, received, Boundary(), step(batch, micro_batch))
        with joint.noting() as noted:
            output = step(batch, micro_batch)
        return StageRun(micro_batch, received, Boundary(), output, (joint, noted))

    def enter(self, micro_batch: int) -> None:
        """Let what follows draw as a micro-batch does."""
        if self._segments is None:
            self._streams.enter_micro_batch(micro_batch)
        else:
            self._segments.begin(micro_batch)

    def enter_again(self) -> None:
        """Let layers that are computed again draw again, in a backward that runs by itself."""
        if self._segments is not None:
            self._segments.resume()

    def resume(self, virtual_stage: int, run: StageRun) -> None:
        """Nothing to prepare: the backward follows its forward, so the random streams are still those of ``run``."""

    def end(self) -> None:
        """Leave the random generators alone until the next micro-batch."""
        if self._segments is not None:
            self._segments.end()

    def may_write(self, virtual_stage: int, where: str) -> bool:
        """Nothing is received, so nothing can be written into."""
        return False

    def owned_layers(self) -> list[nn.Module]:
        """None: one stage splits no backward."""
        return []

    def close(self) -> None:
        """Remove the hooks that switch random streams."""
        if self._segments is not None:
            self._segments.remove()


def _segments(module: nn.Module, streams: SegmentStreams) -> SegmentHooks | None:
    """Hooks that switch streams from layer to layer; ``None`` for a module without a list of layers."""
    try:
        trunk = find_trunk(module)
    except ValueError:
        return None
    return SegmentHooks(trunk.layers(module), streams, parts_outside(module, trunk))
