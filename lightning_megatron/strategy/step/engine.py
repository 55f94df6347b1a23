"""The ways of running a batch on this rank, their shared context, and the choice of one for each batch.

The engine owns what a run needs (stages, gradients, logs) and knows nothing of Lightning's hooks; the strategy calls
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.data_parallel.presplit import splits_itself
from lightning_megatron.experts.exchange.taking_part import Calls, StepCalls
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.marks import Marks
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.pipeline.cut.trunk import find_trunk
from lightning_megatron.pipeline.elsewhere.away import refuse_away
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.schedules.simulation import Timeline
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.assembly.refusals import check_by_hand
from lightning_megatron.strategy.lightning.trainer_access import skips_backward
from lightning_megatron.strategy.logs.weight_writes import WeightsArrive
from lightning_megatron.strategy.options.choices import EngineOptions
from lightning_megatron.strategy.step.among_stages import OneStage, SeveralStages
from lightning_megatron.strategy.step.by_hand import StagesRun, WeightCopies
from lightning_megatron.strategy.step.loss_checks import LossChecks
from lightning_megatron.strategy.step.plain_step import OneStageRun, PlainStep, WholeRun
from lightning_megatron.strategy.step.scheduled_step import ScheduledStep
from lightning_megatron.strategy.step.step import Outcome, Step
from lightning_megatron.strategy.step.step_context import Recording, Stages, StepContext
from lightning_megatron.strategy.world import REAL_WORLD, World

_NOTHING = nullcontext()


class StepEngine:
    """Runs the user's steps on one rank: a training step forward and backward, an evaluation step forward only.

    Whichever way a batch takes (whole, or in micro-batches through the schedule), the outcome is that of one process
    with the whole batch: loss, logs and outputs are joined, gradients are divided once by the number of replicas.

    Args:
        module: the user's module, already cut if there are several stages.
        mesh: the grid.
        device: this rank's device.
        stage: this rank's part of the module; ``None`` with one stage.
        presence: what of the module is on this rank.
        streams: random streams per segment.
        tensor: how parameters are split over tensor-parallel ranks.
        options: the user's choices.
        world: what lies outside of this process.

    Attributes:
        model_gradients: where gradients collect.
        recording: of what the running step logs.
        losses: what was found out about losses.
        logged: tells how what steps of evaluation log and write comes together over the replicas.
        trials: tell how the loss and what the step writes come of parts of a batch.
        splits_itself: whether the module's own code has split it.
        whole: the way of a batch that is not cut into micro-batches.
        has_stages: whether there are several.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        device: torch.device,
        stage: Stage | None,
        presence: Presence,
        streams: SegmentStreams,
        tensor: TensorState,
        options: EngineOptions,
        world: World = REAL_WORLD,
    ) -> None:
        self._module, self._mesh, self._tensor, self._options = module, mesh, tensor, options
        self.splits_itself = splits_itself(module)
        several = mesh.layout.world_size > 1 or options.micro_batch_size != "auto"
        self.model_gradients = ModelGradients(
            module,
            mesh.of_gradients,
            device,
            presence,
            tensor,
            options.gradients,
            several=several,
            layers=(layers := layers_of(module, stage, options.pipeline_layers)),
        )
        Marks.of(module).take(WeightsArrive)
        if options.gradients.weights_arrive:
            Marks.of(module).put(WeightsArrive())
        compares = mesh.layout.tensor > 1 and not self.splits_itself
        shared_by = mesh.sharing_a_batch if compares or mesh.layout.context > 1 else None
        self.losses = LossChecks(
            options.gradients.inspect, shared_by, reads=world.compares, over_context=mesh.layout.context > 1
        )
        stages: Stages
        if stage is None:
            one_stage = stages = OneStage(module, mesh, device, streams)
            check, take = None, None
        else:
            around = options, world, lambda: self._experts.end()  # made below: it asks for what is recorded
            several_stages = SeveralStages(module, mesh, device, stage, tensor, *around)
            stages, check, take = several_stages, refuse_away, several_stages.repeats.take_log
        self._stages, self.has_stages = stages, stage is not None
        self.recording = Recording(module, mesh, device, check, take)
        here = Marks.of(module).get(Calls)
        self._experts: StepCalls = StepCalls(module, here, device, lambda: self.recording.recorder is not None)
        shared = self.model_gradients, self.recording, self.losses, self._experts
        self._context = StepContext(module, mesh, device, stages, streams, options, *shared, layers)
        self._in_parts = ScheduledStep(self._context)
        self.logged, self.trials = self._in_parts.logged, self._in_parts.cuts.trials
        copies = WeightCopies(module, tensor.table, mesh.group("tensor_parallel")) if compares else None
        self._once: WholeRun | None = None
        if stage is None:
            self._once = OneStageRun(self._context, one_stage, self._in_parts.cuts, self._in_parts.drawing)
        elif not module.automatic_optimization:
            check_by_hand(record_timeline=options.record_timeline)
            self._once = StagesRun(self._context, stage, self._in_parts.cuts)
        self.whole: Step = self._in_parts
        if self._once is not None:
            self.whole = PlainStep(self._context, self._once, self._in_parts.cuts, self.logged, copies)

    def step(self, batch: Any) -> Step:
        """The way that a batch of training takes: the plain one with one stage and one micro-batch, or no backward."""
        if not self._module.automatic_optimization or skips_backward(self._module):
            return self.whole
        return self.whole if self.has_stages or self._in_parts.cuts.stays_whole(batch) else self._in_parts

    def evaluate(self, call: Callable[[Any], Any], batch: Any, name: str) -> Outcome:
        """Forward of one batch through all stages; the outcome is equal on every rank of a pipeline."""
        step = self._in_parts if self.has_stages else self.whole
        outcome = step.evaluate(call, batch, name)
        return self.logged.corrected(outcome, call, batch, name) if outcome.differ else outcome

    def between_passes(self) -> AbstractContextManager[None]:
        """Around an update, in whose hooks user code sees the module as between steps, also in the middle of a step."""
        return _NOTHING if self._once is None else self._once.between_passes()

    @property
    def sums_gradients(self) -> bool:
        """Whether a parameter's gradient comes from several ranks or backward passes, or is not simply autograd's."""
        layout = self._mesh.layout
        several = layout.pipeline > 1 or layout.data * layout.context > 1 or self._options.micro_batch_size != "auto"
        options = self._options.gradients
        several = several or layout.tensor > options.experts > 1  # else copies of experts lie on replicas only
        apart = options.layer_dtype is not None or options.offload is not None
        return several or self._tensor.sums_gradients or apart or options.inspect

    @property
    def schedules(self) -> dict[tuple[int, bool], Schedule]:
        """Schedules that were run, by number of micro-batches and whether only forwards ran."""
        return dict(self._context.schedules)

    def note_trained(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        """Say that all stages hold the same copies of trained parts, and which parameters an optimizer updates."""
        self._stages.note_trained(parameters)

    def note_gradients(self) -> None:
        """Called after a backward, once gradients have been summed: what has got any is no copy, whatever its name."""
        self._stages.note_gradients(self.model_gradients.has_gradient)

    def share_copies(self) -> None:
        """Make these copies equal on all stages again, after hooks have run; collective over the pipeline."""
        self._stages.share_copies()

    def settle(self) -> None:
        """Wait until the other stages have the outcome of the last training step, which they fetch when they get there:
        the stage that computes the loss updates its weights meanwhile.
        """
        self._stages.settle()

    def measured_timeline(self) -> Timeline | None:
        """When each computation of the latest training step ran, on all stages; collective over the pipeline.

        Raises:
            RuntimeError: nothing was recorded.
        """
        if not self._options.record_timeline:
            raise RuntimeError("nothing was recorded; pass `MegatronStrategy(record_timeline=True)`.")
        return self._stages.timeline()

    def around_step(self) -> AbstractContextManager[None]:
        """Around a training step, outside of the context of its precision."""
        return self._context.precision.step()

    def balanced(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The user's step, with the balancing losses that the run adds to its own."""
        added = self._in_parts.cuts.mixing.added
        return call if added is None else added.step(call)

    def close(self) -> None:
        """Release hooks, buffers and connections."""
        self._experts.close()
        self._in_parts.cuts.close()
        self.model_gradients.close()
        self._stages.close()


def layers_of(module: nn.Module, stage: Stage | None, name: str = "auto") -> list[str]:
    """Names of the trunk's layers; none, if there is no trunk, and none of that name."""
    try:
        trunk = stage.partition.trunk if stage is not None else find_trunk(module, name)
    except ValueError:
        return []
    return list(trunk.layer_names)
