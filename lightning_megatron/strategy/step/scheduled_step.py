"""A step in micro-batches: forwards and backwards by a schedule, on one stage or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.mesh.batches import (
    auto_micro_batch_size,
    batch_size_of,
    check_alike,
    merge_outputs,
    say_how_cut,
    split_batch,
    weighted_mean,
)
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.random_streams import SegmentStreams
from lightning_megatron.pipeline.run.around import WholeBatch
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep, loss_of
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.strategy.generation.first_try import calls_again, may_call_again
from lightning_megatron.strategy.generation.repeats import Repeats, StartOver
from lightning_megatron.strategy.lightning.trainer_access import stops
from lightning_megatron.strategy.logs.leftovers import AppendedLists
from lightning_megatron.strategy.logs.step_logs import LogRecorder, Recording
from lightning_megatron.strategy.loss.mixing import MixingTrials
from lightning_megatron.strategy.loss.skips import Asks, Skips
from lightning_megatron.strategy.loss.traces import Counters, LastStageWrites
from lightning_megatron.strategy.loss.weighing import Counted
from lightning_megatron.strategy.step.among_stages import Stages
from lightning_megatron.strategy.step.choices import EngineOptions
from lightning_megatron.strategy.step.losses import LossChecks
from lightning_megatron.strategy.step.step import Outcome, ReplicaMean, Window
from lightning_megatron.strategy.step.tries import LossTrials


class ScheduledStep:
    """Runs the user's step on micro-batches; see :class:`~lightning_megatron.strategy.step.step.Step`.

    Args:
        module: the user's module, already cut if there are several stages.
        mesh: the grid.
        device: this rank's device.
        stages: of this rank's pipeline.
        streams: random streams per segment.
        options: the user's choices.
        gradients: of the module.
        recording: of the logs.
        losses: looked at here.
        layers: names of the trunk's layers.

    Attributes:
        schedules: by number of micro-batches, and whether only forwards run.
        around: schedules of steps whose loss is one of the whole batch, by number of the layers' micro-batches.
        mixing: tries whether a mixture's loss is one of the whole batch.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        device: torch.device,
        stages: Stages,
        streams: SegmentStreams,
        options: EngineOptions,
        gradients: ModelGradients,
        recording: Recording,
        losses: LossChecks,
        layers: Sequence[str] = (),
    ) -> None:
        self._module, self._mesh, self._device = module, mesh, device
        self._stages, self._streams, self._options = stages, streams, options
        self._gradients, self._recording, self._losses = gradients, recording, losses
        self._appended = AppendedLists(module)
        self._compares = losses.compares and mesh.rank == mesh.loss_rank  # the ranks that compute losses of one batch
        self._mean = ReplicaMean(mesh, device)
        self._uncut: dict[int, int] = {}
        self._outcome: Outcome | None = None
        self._probed = False
        self.schedules: dict[tuple[int, bool], Schedule] = {}
        self.around: dict[int, Schedule] = {}
        self._forwards = partial(self._schedule, forward_only=True)
        self._writes = LastStageWrites(module, layers)
        self._skips = Skips(module, alone=mesh.layout.data == 1)
        self._layers = layers
        self._outside: tuple[LastStageWrites, LastStageWrites] | None = None
        always = options.whole_batch_loss is True
        self._trials = LossTrials(
            module, layers, mesh, device, stages, streams, recording, self._forwards, always_whole=always
        )
        both = partial(self._schedule, forward_only=False)
        self.mixing = MixingTrials(
            module, mesh, device, stages, streams, recording, lambda: gradients.sink, both, options
        )

    def forward(self, call: Callable[[Any], Any], batch: Any, window: Window) -> Any:
        """Forward and backward of one batch by the schedule; the gradients stay out of sight until :meth:`backward`."""
        sink = self._gradients.sink
        self._stages.begin_training()
        split = [batch]
        if self._options.whole_batch_loss is not True or self._stages.may_run_around:
            split = self._split(batch, self._options.micro_batch_size, alike=True)
        try:
            parts, cut = self._cut(call, batch, split)
            if self.mixing.mixes(call, batch, split, first=window.first) and len(parts) > 1:
                self._trials.keep_whole()
                parts, cut = self._cut(call, batch, split)
            total = cut.total * window.batches * self._mesh.layout.context  # each of whose ranks has a gradient
            scales = [weight / total * window.scale for weight in cut.weights]
            sink.begin(fresh=window.first, reduce=window.last, scale=window.scale)
            asks = self._skips.asks(self._stages.share, self._device) if self._skips.may and len(parts) == 1 else None
            self._outcome = self._run(call, batch, parts, scales, cut, "training_step", asks)
        except Exception as error:
            say_how_cut(error, batch, len(split))
            raise
        self._trials.note_logged([key.name for key in self._outcome.logs.keys])
        if self._outcome.loss is None:
            sink.finish()  # no backward of Lightning's follows
        else:
            sink.withdraw()
        return self._outcome.training_output()

    def backward(self, loss: Tensor, autograd: Callable[[Tensor], None], window: Window) -> None:
        """Wait for the sums over replicas and publish ``.grad``; the schedule has run all backwards."""
        self._gradients.sink.finish()

    def finish(self) -> Outcome | None:
        """The outcome, once."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def evaluate(self, call: Callable[[Any], Any], batch: Any, name: str) -> Outcome:
        """Forward of one batch through all stages; the outcome is equal on every rank of a pipeline."""
        self._stages.begin_evaluation()
        repeats = self._stages.repeats
        attempt = repeats.attempt(name, batch) if repeats is not None else None
        outcome = self._evaluate(call, batch, name)
        if attempt is not None and repeats is not None and isinstance(outcome.output, StartOver):
            batch = attempt.take_back()
            repeats.note(name)
            outcome = self._evaluate(call, batch, name)
        return outcome

    def _evaluate(self, call: Callable[[Any], Any], batch: Any, name: str) -> Outcome:
        chosen = self._options.evaluation_micro_batch_size
        parts = [batch] if chosen == "auto" else self._split(batch, chosen)
        cut = _Cut(self._weights(parts) if len(parts) > 1 else [1.0])
        outcome = self._run(call, batch, parts, [], cut, name)
        self._stages.settle()
        return outcome

    def _split(self, batch: Any, chosen: int | str, *, alike: bool = False) -> list[Any]:
        size = batch_size_of(batch)
        part = auto_micro_batch_size(size, self._mesh.layout.pipeline) if chosen == "auto" else int(chosen)
        if alike and part < size:
            check_alike(batch, size, self._uncut)
        return split_batch(batch, part)

    def _cut(self, call: Callable[[Any], Any], batch: Any, parts: list[Any]) -> tuple[list[Any], _Cut]:
        """The micro-batches that a batch of training runs in, and what their losses and logged values count."""
        whole, replicas = self._options.whole_batch_loss, self._mesh.layout.data
        repeats = self._stages.repeats
        if repeats is not None and self._repeats(repeats, call, parts):
            parts = [batch] if whole and self._options.loss_weight is None else parts
            weights = self._weights(parts)
            return parts, _Cut(weights, self._over_replicas(weights, self._options.loss_weight is not None))
        if self._skips.may and whole and len(parts) > 1:
            if whole == "auto":
                self._skips.say(len(parts), self._mesh.layout.pipeline)
            return [batch], _Cut([float(batch_size_of(batch))], float(batch_size_of(batch)))
        logs: Mapping[str, str] = {}
        counters, sums = Counters(), False
        weigh: Callable[[Any], float] | None = self._options.loss_weight
        layers: list[Any] = []
        if whole and weigh is None and (len(parts) > 1 or self._trials.reading.fits):
            read = self._trials.read(call, batch, parts) if len(parts) > 1 else self._trials.reading
            if repeats is not None and self._trials.again:
                repeats.note("training_step")
                return self._cut(call, batch, parts)
            if read.whole:
                layers, parts = parts if self._trials.around and len(parts) > 1 else [], [batch]
                counters = self._trials.counters.of_layers()
            else:
                logs, counters, sums = read.logs, self._trials.counters, read.way == "sum"
                weigh = read.way if isinstance(read.way, Counted) else None
        elif len(parts) > 1:
            self._trials.say_statistics()
        if sums:
            return parts, _Cut([1.0] * len(parts), float(replicas), logs, counters, sums)
        weights = [float((weigh or batch_size_of)(part)) for part in parts]
        if isinstance(weigh, Counted) and not all(weights):  # a mean over nothing is no number
            parts, weights = [batch], [sum(weights) or 1.0]
        return parts, _Cut(weights, self._over_replicas(weights, weigh is not None), logs, counters, layers=layers)

    def _repeats(self, repeats: Repeats, call: Callable[[Any], Any], parts: Sequence[Any]) -> bool:
        """Whether the training step calls the layers more than once, as far as is known; tried once, if need be."""
        tried, self._probed = self._probed, True
        if (known := repeats.includes("training_step")) or tried:
            return known
        whole = self._options.whole_batch_loss and self._options.loss_weight is None and not self._skips.may
        if not (whole and len(parts) > 1) and may_call_again(self._module, self._layers[0].rpartition(".")[0]):
            around = self._stages, self._streams, self._recording, self._forwards, self._device
            if calls_again(self._module, call, parts[0], *around):
                repeats.note("training_step")
        return repeats.includes("training_step")

    def _weights(self, parts: Sequence[Any]) -> list[float]:
        """Weight of each micro-batch in the means of this replica."""
        weight_of = self._options.loss_weight
        return [float(weight_of(part) if weight_of is not None else batch_size_of(part)) for part in parts]

    def _over_replicas(self, weights: Sequence[float], differ: bool) -> float:
        """The total of the weights over all replicas, so that losses divided by it add up."""
        total, replicas = sum(weights), self._mesh.layout.data
        if not differ or replicas == 1:
            return total * replicas
        shared = torch.tensor(total, dtype=torch.float64, device=self._device)
        dist.all_reduce(shared, group=self._mesh.group("data_parallel"))
        return float(shared)

    def _run(
        self,
        call: Callable[[Any], Any],
        batch: Any,
        parts: list[Any],
        scales: list[float],
        cut: _Cut,
        name: str,
        asks: Asks | None = None,
    ) -> Outcome:
        training = bool(scales)
        repeats = self._stages.repeats
        passes: Callable[..., None] | None = None
        if repeats is not None and repeats.includes(name):
            passes = partial(repeats.train, streams=self._streams) if training else repeats.run
        if self._compares:
            self._losses.take_batch(batch, name, self._device)
        own = training or passes is None
        streams = self._streams.step(training=training) if own else nullcontext()  # else it draws as one process
        with self._recording.step(len(parts), cut.logs) as recorder, streams:
            call = asks.hears(call) if asks is not None else call
            if cut.layers:
                step = self._step_around(call, recorder, batch, scales, cut, name)
            else:
                schedule = self._schedule(len(parts), forward_only=not training)
                chunks = schedule.chunks if passes is None else 1
                recorded = _Recorded(call, recorder, parts, cut, self._writes, chunks)
                step = PipelineStep(schedule, recorded, parts, name, scales, self._gradients.sink, asks)
            self._appended.snapshot()
            with self._stages.running(batch, len(step.micro_batches), training=training) as executor:
                executor.run(step) if passes is None else passes(step, self._writes.undone)
            return self._stages.outcome(partial(self._merge, step, parts, recorder, cut), name)

    def _step_around(
        self,
        call: Callable[[Any], Any],
        recorder: LogRecorder,
        batch: Any,
        scales: list[float],
        cut: _Cut,
        name: str,
    ) -> PipelineStep:
        """A step whose layers run in micro-batches, and the code around them on the whole batch."""
        count = len(cut.layers)
        if count not in self.around:
            self.around[count] = self._stages.schedule(count, forward_only=False, around=True)
        if self._outside is None:  # parts with parameters run once, before the layers or behind them
            bare = LastStageWrites(self._module, self._layers, lambda child: next(child.parameters(), None) is None)
            self._outside = LastStageWrites(self._module, self._layers, lambda _: True), bare
        schedule, last = self.around[count], self._mesh.rank == self._mesh.loss_rank
        calls = _RecordedAround(call, self._recording, recorder, cut, self._outside, reaches_end=last)
        whole = WholeBatch(batch, calls.before, calls.behind)
        return PipelineStep(schedule, calls.layers, cut.layers, name, scales, self._gradients.sink, whole=whole)

    def _schedule(self, micro_batches: int, *, forward_only: bool) -> Schedule:
        key = (micro_batches, forward_only)
        if key not in self.schedules:
            self.schedules[key] = self._stages.schedule(micro_batches, forward_only=forward_only)
        return self.schedules[key]

    def _merge(self, step: PipelineStep, parts: list[Any], recorder: LogRecorder, cut: _Cut) -> Outcome:
        """The outcome of the whole batch, over all replicas; on the stage that computes the loss."""
        weights = cut.weights
        outputs = [step.outputs.get(index) for index in range(len(parts))]  # none, where the step is left out
        sizes = [batch_size_of(part) for part in parts] if len(parts) > 1 else [0]
        self._appended.merge(weights, sizes)
        logs, loss = recorder.collect(self._device), None
        if step.name == "training_step" and step.outputs:
            losses = [loss_of(output).detach() for output in outputs]
            self._losses.note(losses)
            loss = torch.stack(losses).sum() if cut.sums else weighted_mean(losses, weights)
            if not cut.sums and cut.total:  # of what all replicas count, rather than their mean
                loss = loss * (sum(weights) * self._mesh.layout.data / cut.total)
            entries = [output.items() if isinstance(output, Mapping) else () for output in outputs]
            outputs = [{key: value for key, value in items if key != "loss"} or None for items in entries]
        if self._compares:
            self._losses.compare(loss, step.name, self._device)
        output = merge_outputs(outputs, weights, sizes, step.name) if outputs[0] is not None else None
        outcome = Outcome(logs, loss, output, stop=stops(self._module))
        self._mean.start(outcome, trains=step.name == "training_step")
        self._mean.finish(outcome)
        return outcome


@dataclass
class _Cut:
    """What the micro-batches of a batch count.

    Attributes:
        weights: in means.
        total: of the weights, over all replicas.
        logs: how logged values combine, where that is known.
        counters: put back before each of them.
        sums: whether their losses are added up.
        layers: the micro-batches in which layers run, where the loss is one of the whole batch.
    """

    weights: list[float]
    total: float = 1.0
    logs: Mapping[str, str] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    sums: bool = False
    layers: list[Any] = field(default_factory=list)


class _Recorded:
    """The user's step, telling the recorder which micro-batch its logs belong to."""

    def __init__(
        self,
        call: Callable[[Any], Any],
        recorder: LogRecorder,
        parts: Sequence[Any],
        cut: _Cut,
        writes: LastStageWrites,
        chunks: int,
    ) -> None:
        self._call, self._recorder, self._writes = call, recorder, writes
        self._chunks, self._left = chunks, [chunks] * len(parts)
        self._weights = cut.weights
        self._sizes = [float(batch_size_of(part)) for part in parts] if cut.logs else cut.weights
        self._counters = cut.counters if len(cut.counters) else None
        if self._counters is not None:
            self._counters.begin()

    def __call__(self, part: Any, index: int) -> Any:
        if self._counters is not None:
            self._counters.put_back(self._chunks - self._left[index])
        self._recorder.begin_micro_batch(self._weights[index], self._sizes[index])
        self._left[index] -= 1
        with self._writes.undone() if self._left[index] else nullcontext():
            return self._call(part)


class _RecordedAround:
    """The user's step on a whole batch, of which the layers run in micro-batches: it writes and logs once."""

    def __init__(
        self,
        call: Callable[[Any], Any],
        recording: Recording,
        recorder: LogRecorder,
        cut: _Cut,
        writes: tuple[LastStageWrites, LastStageWrites],
        *,
        reaches_end: bool,
    ) -> None:
        self._call, self._recording, self._recorder, self._writes = call, recording, recorder, writes
        self._counters, self._weight, self._reaches_end = cut.counters, cut.weights[0], reaches_end
        self._turns = [0] * len(cut.layers)
        self._counters.begin()

    def layers(self, part: Any, index: int) -> Any:
        """On a micro-batch, for its layers."""
        self._counters.put_back(self._turns[index])
        self._turns[index] += 1
        with self._writes[0].undone(), self._recording.aside():
            return self._call(part)

    def before(self, batch: Any, _: int) -> Any:
        """On the whole batch, up to the layers."""
        if not self._reaches_end:
            return self._call(batch)
        with self._writes[1].undone(), self._recording.aside():
            return self._call(batch)

    def behind(self, batch: Any, _: int) -> Any:
        """On the whole batch, from the layers' output on."""
        self._recorder.begin_micro_batch(self._weight, self._weight)
        return self._call(batch)
