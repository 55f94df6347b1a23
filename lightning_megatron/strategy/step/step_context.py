"""What every way of running a step on a rank stands on: the rank's stages, its streams, logs, gradients and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.experts.exchange.taking_part import StepCalls
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.precisions import StepPrecision
from lightning_megatron.pipeline.run.executor import PipelineExecutor
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.schedules.simulation import Timeline
from lightning_megatron.strategy.generation.repeats import Repeats
from lightning_megatron.strategy.logs.step_logs import Recording
from lightning_megatron.strategy.options.choices import EngineOptions
from lightning_megatron.strategy.step.loss_checks import LossChecks
from lightning_megatron.strategy.step.step import Outcome


class Stages(Protocol):
    """One stage or several."""

    def schedule(self, micro_batches: int, *, forward_only: bool, around: bool = False) -> Schedule:
        """The lowered schedule of a step.

        Args:
            micro_batches: how many there are.
            forward_only: whether no backward follows.
            around: whether the loss is computed behind all forwards.
        """

    @property
    def repeats(self) -> Repeats | None:
        """The steps that call the model repeatedly; ``None`` with one stage, which runs them as any other."""

    @property
    def runs_once(self) -> frozenset[str]:
        """Names of the parts before the layers that run but once where a rank runs the step's code several times."""

    @property
    def may_run_around(self) -> bool:
        """Whether layers may run in micro-batches, and the code around them on the whole batch; equal on all ranks."""

    @property
    def is_behind_layers(self) -> bool:
        """Whether the user's step is running, and in or past the last layer."""

    def leaves_behind(self, where: str) -> bool:
        """Whether layers of this stage were seen to leave anything behind besides their outputs in this step."""

    def begin_training(self) -> None:
        """Called before each training step."""

    def begin_evaluation(self) -> None:
        """Called before each step of evaluation."""

    def looks(self, call: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
        """The user's step of this name, looked at for what it writes that other stages have to hear of."""

    def running(self, batch: Any, micro_batches: int, *, training: bool) -> AbstractContextManager[PipelineExecutor]:
        """Around the schedule of a step; gives what runs it."""

    def outcome(self, make: Callable[[], Outcome], name: str) -> Outcome:
        """The outcome of a step, which ``make`` gives on the stage that computes the loss; equal on all stages."""

    def share(self, value: Tensor) -> Tensor:
        """A scalar of the stage that computes the loss, on every stage, in the middle of a step."""

    def note_trained(self, parameters: Iterable[nn.Parameter]) -> None:
        """Say that all stages hold the same copies of trained parts, and which parameters an optimizer updates."""

    def note_gradients(self, has_gradient: Callable[[nn.Parameter], bool]) -> None:
        """Called after a backward; whether a parameter ``has_gradient`` is known alike on all stages that share it."""

    def share_copies(self) -> None:
        """Make these copies equal again, after hooks have run; collective over the pipeline."""

    def release(self) -> None:
        """Take off what trials have put on a module that is not cut."""

    def settle(self) -> None:
        """Wait until the other stages have fetched what was sent to them."""

    def timeline(self) -> Timeline | None:
        """The latest training step on all stages; ``None`` with one stage, and before the first."""

    def close(self) -> None:
        """Release hooks and connections."""


@dataclass(frozen=True)
class StepContext:
    """What steps, and trials of steps, of one module run on.

    Attributes:
        module: the user's, already cut if there are several stages.
        mesh: the grid.
        device: where this rank's tensors live.
        stages: of this rank's pipeline.
        streams: random streams per segment.
        options: the user's choices.
        gradients: of the module.
        recording: of the logs.
        losses: looked at as they come.
        experts: calls of those that replicas share out.
        layers: names of the trunk's layers.
        schedules: by number of micro-batches, and whether only forwards run.
        precision: around the steps, in which their backwards run.
    """

    module: pl.LightningModule
    mesh: ParallelMesh
    device: torch.device
    stages: Stages
    streams: SegmentStreams
    options: EngineOptions
    gradients: ModelGradients
    recording: Recording
    losses: LossChecks
    experts: StepCalls
    layers: Sequence[str] = ()
    schedules: dict[tuple[int, bool], Schedule] = field(default_factory=dict)
    precision: StepPrecision = field(default_factory=StepPrecision)

    def schedule(self, micro_batches: int, *, forward_only: bool) -> Schedule:
        """The lowered schedule of a step of so many micro-batches."""
        key = (micro_batches, forward_only)
        if key not in self.schedules:
            self.schedules[key] = self.stages.schedule(micro_batches, forward_only=forward_only)
        return self.schedules[key]
