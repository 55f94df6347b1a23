"""The shared context of all ways to run a step on a rank: stages, random streams, logs, gradients and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, Protocol, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.experts.exchange.taking_part import StepCalls
from lightning_megatron.mesh.autograd import Forgetting
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.mesh.precisions import StepPrecision
from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step, names_in
from lightning_megatron.pipeline.run.executor import PipelineExecutor
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.schedules.simulation import Timeline
from lightning_megatron.strategy.evaluation.logged_reads import LoggedReads
from lightning_megatron.strategy.generation.repeats import Repeats
from lightning_megatron.strategy.logs.combining import Narrowed
from lightning_megatron.strategy.logs.metrics import GatherOverReplicas, MetricCalls
from lightning_megatron.strategy.logs.step_logs import LogRecorder, TakesLog, TakesValue
from lightning_megatron.strategy.options.choices import EngineOptions
from lightning_megatron.strategy.step.loss_checks import LossChecks
from lightning_megatron.strategy.step.step import Outcome

Over = Literal["", "training", "evaluation"]
"""Which steps the replicas run together."""

_DIFFERENTIATES = {"backward", "manual_backward", "autograd", "grad", "grads", "vjp", "jacobian", "hessian"}
_DIFFERENTIATES |= {"grad_and_value", "value_and_grad", "jacrev", "jacfwd"}  # of torch.func, which has no hooks
_KEPT = (
    "pass `whole_batch_loss=False`, which tries no step, or ask for gradients (`torch.autograd.grad`) in code of the "
    "module that trials can read"
)


class Recording:
    """The logs of the step that is running on this rank, if one is.

    Args:
        module: the user's module.
        mesh: the grid.
        device: where tensors live.
        check: see :class:`.LogRecorder`.
        take: likewise.

    Attributes:
        recorder: takes what the running step logs; ``None`` between steps.
        hand_on: logs of a step -> Lightning, for steps that have nothing to aggregate; ``None`` outside of a run.
        constant: keys whose ``batch_size=`` trials have found to be the same for parts of a batch and the whole.
        told: metrics that are told numbers of a batch (by identity), and how its micro-batches weigh in those.
    """

    hand_on: TakesValue | None = None

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        device: torch.device,
        check: Callable[[Any, str], None] | None = None,
        take: TakesLog | None = None,
    ) -> None:
        self._module, self._check, self._take = module, check, take
        self._reads = LoggedReads(module)
        self._metric_copies: dict[tuple[int, int], Metric] = {}
        self.recorder: LogRecorder | None = None
        self.constant, self.told = set[str](), Narrowed()
        self._device = device
        self._replicas = mesh.group("data_parallel") if mesh.layout.data > 1 else None
        self._gather = None if self._replicas is None else GatherOverReplicas(self._replicas)

    @contextmanager
    def step(
        self,
        micro_batches: int = 1,
        within: Mapping[str, Any] = MappingProxyType({}),
        *,
        alone: bool = False,
        over: Over = "",
    ) -> Iterator[LogRecorder]:
        """Record ``self.log`` calls while the user's step runs on this many micro-batches; see :class:`.LogRecorder`.

        Args:
            micro_batches: of the step.
            within: see :class:`.LogRecorder`.
            alone: whether no other rank or micro-batch has to do with the values.
            over: which steps the replicas run together: "training", of which each takes part in all; "evaluation",
                where they meet if something is logged; "" for none, as in trials.
        """
        replicas = self._replicas is not None and bool(over)
        given = self._gather if replicas else None, self._total if replicas and over == "training" else None
        several = micro_batches > 1 or replicas
        calls = MetricCalls(self._metric_copies, self.told.chosen, *given) if several else None
        said = self._take, self.hand_on if alone else None, self.constant
        self.recorder = recorder = LogRecorder(self._module, calls, self._check, within, *said)
        try:
            with nullcontext() if said[1] else self._reads.refused(recorder.names):
                yield recorder
        finally:
            self.recorder = None

    def learn(self, metrics: Mapping[str, tuple[Metric, tuple[Any, ...]]], usual: Any, over: Over) -> None:
        """Take note of which metrics are told numbers of a batch. Collective over the replicas where these run the step
        together, as they may not all see it in their own batches.

        Args:
            metrics: name -> the metric, and the ways in which micro-batches may weigh in its numbers.
            usual: the way to weigh of the loss, which goes before the others.
            over: see :meth:`step`.
        """
        mine = {name: ways for name, (_, ways) in metrics.items()}
        together = self._replicas is not None and over == "training"
        told = objects.gather(mine, self._replicas) if together else [mine]
        for name, (metric, ways) in metrics.items():
            agreed = tuple(way for way in ways if all(way in each.get(name, ()) for each in told))
            if agreed:
                self.told.learn(id(metric), agreed, usual)

    def _total(self, numbers: list[float]) -> list[float]:
        """Sums over the replicas."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        summed: list[float] = raw_all_reduce(mine, cast("Any", self._replicas), keep=False).tolist()
        return summed

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around a part of the step whose logs another part gives again."""
        kept, self.recorder = self.recorder, LogRecorder(self._module, None, self._check, take=self._take)
        try:
            yield
        finally:
            self.recorder = kept

    def metric_calls(self) -> MetricCalls | None:
        """The running step's calls of metrics, where it has several micro-batches."""
        return None if self.recorder is None else self.recorder.metric_calls


class Stages(Protocol):
    """One stage or several."""

    def schedule(self, micro_batches: int, *, forward_only: bool, around: bool = False) -> Schedule:
        """The lowered schedule of a step.

        Args:
            micro_batches: how many there are.
            forward_only: whether no backward follows.
            around: whether the loss is computed after all forwards.
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

    def set_back(self) -> Mapping[tuple[str, Any], Any]:
        """(place, key) -> what the user's step has set it to after a layer that had set it; asked at the end of the
        step, where the loss is computed.
        """

    def note_missing(self, error: Exception) -> None:
        """Add to an error of the step's what it has not found as another stage has it."""

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
    """Context in which the steps, and the trials of steps, of one module run.

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

    @property
    def replicas_told(self) -> int:
        """Replicas of which the user is told what each has of its own samples; 1 where that is what they mean."""
        return 1 if self.options.whole_batch_loss is False else self.mesh.layout.data

    @property
    def passes(self) -> Repeats | None:
        """Runs training steps that are known to call the layers more than once; ``None`` where they do not."""
        repeats = self.stages.repeats
        return repeats if repeats is not None and repeats.includes("training_step") else None

    @contextmanager
    def tries(self) -> Iterator[None]:
        """Around forwards of a trial that no backward follows: nothing is kept for one, unless code asks for gradients.

        A trial runs the samples of several micro-batches or replicas at once, of which a step keeps fewer.
        """
        with nullcontext() if self._differentiates else Forgetting(_KEPT).around_forward():
            yield

    @cached_property
    def _differentiates(self) -> bool:
        """Whether code of the step may run a backward by itself."""
        return any(_DIFFERENTIATES & {*names_in(each.__code__)[0]} for each in functions_of_step(self.module))

    def schedule(self, micro_batches: int, *, forward_only: bool) -> Schedule:
        """The lowered schedule of a step of so many micro-batches."""
        key = (micro_batches, forward_only)
        if key not in self.schedules:
            self.schedules[key] = self.stages.schedule(micro_batches, forward_only=forward_only)
        return self.schedules[key]
