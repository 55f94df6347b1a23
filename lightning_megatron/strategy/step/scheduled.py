"""One step of training or evaluation, from a batch to its result, on this rank.

The engine owns what a run needs (stage, executor, gradient buckets, exchange) and knows nothing of Lightning's hooks;
the strategy calls it. Two ways lead through it: the *plain* way, with one stage and one micro-batch, leaves the
backward to Lightning and only sums gradients over replicas; the *scheduled* way runs forwards and backwards by a
schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_megatron.checkpoints.state.slices import TensorState
from lightning_megatron.data_parallel.buckets.bucket import NARROW
from lightning_megatron.data_parallel.buckets.buckets import GradientBuckets
from lightning_megatron.data_parallel.buckets.local import LocalGradients
from lightning_megatron.data_parallel.model_gradients import GradientOptions, ModelGradients
from lightning_megatron.data_parallel.presplit import ReplicaAverage, splits_itself
from lightning_megatron.mesh.batches import (
    auto_micro_batch_size,
    batch_size_of,
    check_alike,
    checksum,
    map_tensors,
    merge_outputs,
    split_batch,
    weighted_mean,
)
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.mesh.random_streams import SegmentHooks, SegmentStreams
from lightning_megatron.pipeline.cut.partition import parts_outside
from lightning_megatron.pipeline.cut.trunk import find_trunk
from lightning_megatron.pipeline.run.clock import StepRecorder, gather_timeline
from lightning_megatron.pipeline.run.executor import PipelineExecutor, Step, loss_of
from lightning_megatron.pipeline.run.links import StageLinks
from lightning_megatron.pipeline.schedules.by_name import ScheduleShape, make_schedule, schedule_shape
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.schedules.lowering import halve_backwards, join_halves, lower
from lightning_megatron.pipeline.schedules.simulation import Timeline
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.logs.appended import AppendedLists
from lightning_megatron.strategy.logs.averaged_copies import CopyExchange
from lightning_megatron.strategy.logs.batch_metrics import MetricCalls
from lightning_megatron.strategy.logs.leftovers import ModuleState
from lightning_megatron.strategy.logs.step_logs import LogRecorder, StepExchange, StepResult

LossWeight = Callable[[Any], float]
_ALIKE = {torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative


@dataclass(frozen=True)
class EngineOptions:
    """Choices of the user that the engine follows; see ``MegatronStrategy``."""

    micro_batch_size: int | str
    evaluation_micro_batch_size: int | str
    schedule: str | Callable[..., Any]
    chunks: int | None
    schedule_options: Mapping[str, Any]
    loss_weight: LossWeight | None
    variable_shapes: bool
    record_timeline: bool
    sequence_parallel: bool
    gradients: GradientOptions

    @property
    def schedule_shape(self) -> ScheduleShape:
        """Chunks per stage, and where they lie."""
        return schedule_shape(self.schedule, self.chunks, self.schedule_options.get("placement"))

    def make_schedule(self, stages: int, micro_batches: int, *, forward_only: bool = False) -> Schedule:
        """The schedule of a step of ``micro_batches``."""
        return make_schedule(
            self.schedule,
            stages,
            micro_batches,
            chunks=self.chunks,
            forward_only=forward_only,
            **self.schedule_options,
        )


class StepEngine:
    """Runs steps of one module on one rank.

    Args:
        module: the user's module, already cut if there are several stages.
        mesh: the grid.
        device: this rank's device.
        stage: this rank's part of the module; ``None`` with one stage.
        streams: random streams per segment.
        tensor: how parameters are split over tensor-parallel ranks.
        options: the user's choices.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        device: torch.device,
        stage: Stage | None,
        streams: SegmentStreams,
        tensor: TensorState,
        options: EngineOptions,
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._device = device
        self._stage = stage
        self._streams = streams
        self._tensor = tensor
        self._options = options
        self._exchange = StepExchange(mesh, device)
        self._state = ModuleState(module, stage.partition, mesh, device) if stage is not None else None
        self._copies = CopyExchange(module, stage, mesh, device) if _has_copies(stage) else None
        self._copies_may_differ = False
        self._uncut: dict[int, int] = {}
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._executor: PipelineExecutor | None = None
        self._links: StageLinks | None = None
        self._parameters: list[nn.Parameter] | None = None
        self._recorder = StepRecorder(device) if options.record_timeline else None
        self._segments: SegmentHooks | None = None
        self.splits_itself = splits_itself(module)
        replicated = self.splits_itself and mesh.layout.data > 1
        self._replicas = ReplicaAverage(module, mesh.group("data_parallel")) if replicated else None
        self._reduces = True
        self.model_gradients = ModelGradients(module, mesh, device, stage, tensor, options.gradients)
        self.bad_micro_batch: int | None = None
        self._losses_compared = mesh.layout.tensor == 1 or self.splits_itself
        self._appended = AppendedLists(module)
        self._metric_copies: dict[tuple[int, int], Metric] = {}
        self.recorder: LogRecorder | None = None

    @property
    def gradients(self) -> GradientBuckets | LocalGradients | None:
        """Where gradients collect; ``None`` where one backward leaves them in ``.grad``."""
        return self.model_gradients.buckets or self.model_gradients.local

    @property
    def sums_gradients(self) -> bool:
        """Whether a parameter's gradient comes from several ranks or backward passes, or is not simply autograd's."""
        layout = self._mesh.layout
        several = layout.pipeline > 1 or layout.data > 1 or self._options.micro_batch_size != "auto"
        options = self._options.gradients
        return several or self._tensor.sums_gradients or options.layer_dtype is not None or options.inspect

    def close(self) -> None:
        """Release hooks and buffers."""
        self.model_gradients.close()
        if self._segments is not None:
            self._segments.remove()
            self._segments = None
        if self._links is not None:
            self._links.close()
            self._links = None
        self._executor = None

    def is_plain(self, batch: Any) -> bool:
        """Whether this batch takes the plain way: one stage, one micro-batch."""
        return self._stage is None and (
            self._options.micro_batch_size == "auto" or batch_size_of(batch) <= int(self._options.micro_batch_size)
        )

    def train(
        self,
        call: Callable[[Any], Any],
        batch: Any,
        *,
        accumulate: int,
        fresh: bool,
        reduce: bool,
        scale: float = 1.0,
    ) -> StepResult:
        """Forward and backward of one batch by the schedule.

        Args:
            call: the user's ``training_step``, taking a micro-batch.
            batch: the batch, equal on all stages of a replica.
            accumulate: batches whose gradients are averaged.
            fresh: whether this is the first of them.
            reduce: whether this is the last.
            scale: factor of the loss while gradients are computed.

        Returns:
            The step's result, equal on every rank.
        """
        assert self.gradients is not None
        self.share_copies()
        self._copies_may_differ = self._copies is not None
        parts = self._split(batch, self._options.micro_batch_size, alike=True)
        weights, total = self._weights(parts, across_replicas=True)
        scales = [weight / (total * accumulate) * scale for weight in weights]
        self.gradients.begin(fresh=fresh, reduce=reduce, scale=scale)
        result = self._run(call, batch, parts, scales, weights, "training_step")
        self.gradients.withdraw()
        return result

    def evaluate(self, call: Callable[[Any], Any], batch: Any, name: str) -> StepResult:
        """Forward of one batch through all stages; the result is equal on every rank of a pipeline."""
        if self._stage is None:
            with self.recording(name):
                output = call(batch)
                return self._exchange.share(self._result([output], [1.0], [0], name))
        if self._copies_may_differ:
            self.share_copies()
        chosen = self._options.evaluation_micro_batch_size
        parts = [batch] if chosen == "auto" else self._split(batch, chosen)
        weights, _ = self._weights(parts, across_replicas=False)
        result = self._run(call, batch, parts, None, weights, name)
        self.settle()
        return result

    def remember_copies(self, trained: Iterable[nn.Parameter] = ()) -> None:
        """Say that all stages hold the same copies of trained parts, and which parameters an optimizer updates."""
        if self._copies is not None:
            self._copies.note_trained(trained)

    def settle(self) -> None:
        """Wait until the other stages have the result of the last training step, which they fetch when they get there:
        the stage that computes the loss updates its weights meanwhile.
        """
        self._exchange.settle()

    def share_copies(self) -> None:
        """Make them equal on all stages again, after hooks have run; collective over the pipeline."""
        if self._copies is not None:
            self._copies_may_differ = False
            self._copies.share()

    def record_plain(self, call: Callable[[Any], Any], batch: Any) -> tuple[Any, StepResult]:
        """Forward of one batch the plain way: the output keeps its graph; :meth:`finish_plain` completes the logs."""
        with self.recording("training_step"):
            output = call(batch)
            assert self.recorder is not None
            keys, rows = self.recorder.collect(self._device)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and self._module.automatic_optimization:
            self._check_equal_losses(loss.detach())
        result = StepResult(None, None, keys, rows)
        self._exchange.start(result)
        return output, result

    def finish_plain(self, result: StepResult) -> StepResult:
        """Wait for the logs of all replicas, which travelled during the backward."""
        self._exchange.finish(result)
        return result

    def begin_plain_gradients(self, *, reduce: bool, fresh: bool | None, scale: float = 1.0) -> None:
        """Prepare the buckets for a backward that Lightning runs; arguments as :meth:`GradientBuckets.begin`."""
        self._reduces = reduce
        if self.gradients is not None:
            replicas = self._mesh.layout.data
            self.gradients.begin(fresh=fresh, reduce=reduce, divide_by=replicas, scale=scale, once=True)
            self.gradients.set_final(True)

    def finish_gradients(self) -> None:
        """Wait for the sums over replicas and publish ``.grad``."""
        if self.gradients is not None:
            self.gradients.finish()
        elif self._replicas is not None and self._reduces:
            self._replicas.average()

    def _split(self, batch: Any, chosen: int | str, *, alike: bool = False) -> list[Any]:
        size = batch_size_of(batch)
        part = auto_micro_batch_size(size, self._mesh.layout.pipeline) if chosen == "auto" else int(chosen)
        if alike and part < size:
            check_alike(batch, size, self._uncut)
        return split_batch(batch, part)

    def _weights(self, parts: list[Any], *, across_replicas: bool) -> tuple[list[float], float]:
        """Weight of each micro-batch, and their total; the total covers all replicas so that losses divided by it
        add up.
        """
        weight_of = self._options.loss_weight
        if len(parts) == 1 and not across_replicas:
            return [1.0], 1.0
        weights = [float(weight_of(part) if weight_of is not None else batch_size_of(part)) for part in parts]
        total = sum(weights)
        replicas = self._mesh.layout.data
        if not across_replicas:
            return weights, total
        if weight_of is None or replicas == 1:
            return weights, total * replicas
        shared = torch.tensor(total, dtype=torch.float64, device=self._device)
        dist.all_reduce(shared, group=self._mesh.group("data_parallel"))
        return weights, float(shared)

    def _run(
        self,
        call: Callable[[Any], Any],
        batch: Any,
        parts: list[Any],
        scales: list[float] | None,
        weights: list[float],
        name: str,
    ) -> StepResult:
        schedule = self._schedule(len(parts), forward_only=scales is None)
        with self.recording(name), self._streams.step(training=scales is not None):
            recorder = self.recorder
            assert recorder is not None
            recorder.metric_calls = MetricCalls(self._metric_copies) if len(parts) > 1 else None
            self._appended.snapshot()
            step = Step(schedule, _Recorded(call, recorder, weights), parts, name, scales)
            if self._stage is None:
                self._run_single(step)
            else:
                executor = self._pipeline()
                self._check_equal_batches(batch, len(parts))
                self._exchange.expect()
                executor.run(step)
                if step.training and self._state is not None:
                    self._state.share_early_buffers()
            if not self._has_loss:
                result = self._exchange.share(None)
                assert self._state is not None
                self._state.apply(result.state)
                return result
            outputs = [step.outputs[index] for index in range(len(parts))]
            sizes = [batch_size_of(part) for part in parts] if len(parts) > 1 else [0]
            self._appended.merge(weights, sizes)
            return self._exchange.share(self._result(outputs, weights, sizes, name))

    @property
    def _has_loss(self) -> bool:
        return self._mesh.rank == self._mesh.loss_rank

    def _result(self, outputs: list[Any], weights: list[float], sizes: list[int], name: str) -> StepResult:
        assert self.recorder is not None
        keys, rows = self.recorder.collect(self._device)
        if self._stage is not None:
            self._stage.cursor.watch_plan.note_logged(name, [key.name for key in keys])
        loss = None
        if name == "training_step":
            losses = [loss_of(output).detach() for output in outputs]
            self._note_bad(losses)
            loss = weighted_mean(losses, weights)
            self._check_equal_losses(loss)
            outputs = [_without_loss(output) for output in outputs]
        output = merge_outputs(outputs, weights, sizes, name) if outputs[0] is not None else None
        state = self._state.changes() if self._state is not None else []
        return StepResult(loss, output, keys, rows, state)

    def _note_bad(self, losses: list[Tensor]) -> None:
        """Remember the first micro-batch whose loss is not finite, if anybody will ask."""
        if self._options.gradients.inspect and self.bad_micro_batch is None:
            finite = torch.stack([loss.isfinite().all() for loss in losses]).tolist()
            self.bad_micro_batch = next((index for index, fine in enumerate(finite) if not fine), None)

    def note_plain_loss(self, loss: Tensor) -> None:
        """The same for the loss of a plain step, which is its only micro-batch."""
        self._note_bad([loss.detach()])

    def _run_single(self, step: Step) -> None:
        """One stage, several micro-batches: forward and backward of each in turn."""
        if self._segments is None:
            self._segments = self._make_segments()
        for index, part in enumerate(step.micro_batches):
            if self._segments is not None:
                self._segments.begin(index)
            output = step.call(part, index)
            if step.loss_scales is not None:
                assert self.gradients is not None
                self.gradients.set_final(index == len(step.micro_batches) - 1)
                loss = loss_of(output)
                torch.autograd.backward(loss, torch.full_like(loss, step.loss_scales[index], requires_grad=False))
            step.outputs[index] = map_tensors(output, torch.detach)
        if self._segments is not None:
            self._segments.end()

    def _make_segments(self) -> SegmentHooks | None:
        try:
            trunk = find_trunk(self._module)
        except ValueError:
            return None
        return SegmentHooks(trunk.layers(self._module), self._streams, parts_outside(self._module, trunk))

    def _pipeline(self) -> PipelineExecutor:
        if self._executor is None:
            assert self._stage is not None
            self._links = StageLinks(
                self._mesh.group("pipeline_parallel"), self._mesh.pipeline_ranks, self._device, self._equal_boundaries()
            )
            self._executor = PipelineExecutor(
                self._stage, self._links, self._device, self._options.variable_shapes, self._recorder
            )
        self._executor.gradients = self.gradients
        return self._executor

    def _equal_boundaries(self) -> Any:
        """Group of ranks that hold the same hidden state between layers: the tensor group, where this package split it
        and not along the sequence.
        """
        split = self._mesh.layout.tensor > 1 and bool(self._tensor.table)
        return self._mesh.group("tensor_parallel") if split and not self._options.sequence_parallel else None

    def _schedule(self, micro_batches: int, *, forward_only: bool) -> Schedule:
        key = (micro_batches, forward_only)
        if key not in self._schedules:
            schedule = self._options.make_schedule(self._mesh.layout.pipeline, micro_batches, forward_only=forward_only)
            self._schedules[key] = (halve_backwards if self._rounds() else join_halves)(lower(schedule))
        return self._schedules[key]

    def _rounds(self) -> bool:
        """Whether layers compute in 16 bits."""
        narrow = any(parameter.dtype in NARROW for parameter in self._module.parameters())
        return narrow or torch.is_autocast_enabled(self._device.type)

    def measured_timeline(self) -> Timeline | None:
        """When each computation of the latest training step ran, on all stages; collective over the pipeline."""
        if self._recorder is None:
            raise RuntimeError("nothing was recorded; pass `MegatronStrategy(record_timeline=True)`.")
        if self._stage is None:
            return None
        return gather_timeline(self._recorder, self._mesh.group("pipeline_parallel"), self._mesh.pipeline_ranks)

    def _check_equal_batches(self, batch: Any, micro_batches: int) -> None:
        """Refuse to train on batches that differ between the stages of a replica."""
        assert self._links is not None
        mine = [checksum(batch), float(micro_batches), self._trained_here()]
        before = self._links.compare_notes(self._mesh.stage, mine)
        arriving = 0.0 if before is None else before[2]
        self._pipeline().expect_gradients(arriving, arriving + mine[2])
        if before is not None and before[:2] != mine[:2]:
            raise RuntimeError(
                "the pipeline stages of one replica loaded different batches. Every stage must load the same one: "
                "seed the sampler (`L.seed_everything`), let Lightning add its distributed sampler, or shard by "
                "`trainer.strategy.distributed_sampler_kwargs` instead of the global rank."
            )

    def _check_equal_losses(self, loss: Tensor) -> None:
        """Refuse, in the first step, a loss that tensor-parallel ranks do not share: it counts slices somewhere."""
        if self._losses_compared or loss.numel() != 1 or not loss.isfinite():
            return
        self._losses_compared = True
        found = torch.cat([loss.reshape(1), -loss.reshape(1)]).double()
        extremes = raw_all_reduce(found, self._mesh.group("tensor_parallel"), maximum=True)
        if not extremes.sum() <= _ALIKE.get(loss.dtype, 1e-4) * extremes.abs().max():
            highest, lowest = extremes[0].item(), -extremes[1].item()
            raise RuntimeError(
                f"the loss differs between tensor-parallel ranks, from {lowest:.6g} to {highest:.6g}. Each of them "
                "holds slices of weights, so a sum over `self.parameters()`, or of a layer's weight, counts its own "
                "slices only. Use the optimizer's `weight_decay` instead of a penalty in the loss, or "
                "`tensor_parallel_size=1`."
            )

    def _trained_here(self) -> float:
        """Number that changes when parameters of this stage are frozen or unfrozen."""
        if self._parameters is None:
            self._parameters = list(self._module.parameters())
        return float(hash(tuple(parameter.requires_grad for parameter in self._parameters)) % (1 << 32))

    @contextmanager
    def recording(self, name: str) -> Iterator[None]:
        """Record ``self.log`` calls while the user's step runs."""
        self.recorder = LogRecorder(self._module, self._stage.cursor.refuse_away if self._stage is not None else None)
        if self._state is not None:
            self._state.snapshot()
        fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(fastpath and self._stage is None)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)
            self.recorder = None


def _has_copies(stage: Stage | None) -> TypeGuard[Stage]:
    return stage is not None and bool(stage.partition.copies.sources or stage.partition.copies.buffers)


class _Recorded:
    """The user's step, telling the recorder which micro-batch its logs belong to."""

    def __init__(self, call: Callable[[Any], Any], recorder: LogRecorder, weights: list[float]) -> None:
        self._call = call
        self._recorder = recorder
        self._weights = weights

    def __call__(self, part: Any, index: int) -> Any:
        self._recorder.begin_micro_batch(self._weights[index])
        return self._call(part)


def _without_loss(output: Any) -> Any:
    if isinstance(output, Mapping):
        return {key: value for key, value in output.items() if key != "loss"} or None
    return None
