"""A step in micro-batches: forwards and backwards by a schedule, on one stage or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.data_parallel.renormalised_rows import renormalises
from lightning_megatron.mesh.batches import batch_size_of, merge_outputs, weighted_mean
from lightning_megatron.mesh.draws.one_stream import OneStream
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.pipeline.run.around import WholeBatch
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep, loss_of
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.strategy.evaluation.logged import LoggedInEvaluation
from lightning_megatron.strategy.generation.repeats import Attempt, StartOver
from lightning_megatron.strategy.hooks.kept_hooks import HookTables
from lightning_megatron.strategy.lightning.hooks import writes_unseen
from lightning_megatron.strategy.lightning.trainer_access import stops
from lightning_megatron.strategy.logs.batch_writes import BatchWrites
from lightning_megatron.strategy.logs.joined import Joint, Unforeseen
from lightning_megatron.strategy.logs.leftovers import AppendedLists
from lightning_megatron.strategy.logs.recorded_step import Recorded, RecordedAround
from lightning_megatron.strategy.logs.step_logs import LogRecorder, no_logs
from lightning_megatron.strategy.logs.weight_writes import WrittenInRuns
from lightning_megatron.strategy.loss.cuts import Cut, Cuts
from lightning_megatron.strategy.loss.said import logs_partly, say_how_cut
from lightning_megatron.strategy.loss.skips import Asks
from lightning_megatron.strategy.loss.traces import LastStageWrites
from lightning_megatron.strategy.step.drawn_steps import Drawing
from lightning_megatron.strategy.step.evaluated_parts import EvaluatedParts, RunWhole
from lightning_megatron.strategy.step.replica_mean import ReplicaMean
from lightning_megatron.strategy.step.step import Accumulation, Outcome
from lightning_megatron.strategy.step.step_context import Over, StepContext


class ScheduledStep:
    """Runs the user's step on micro-batches; see :class:`~lightning_megatron.strategy.step.step.Step`.

    Args:
        context: what steps run on.

    Attributes:
        cuts: how batches are cut.
        drawing: whose samples draws are for.
        around: schedules of steps whose loss is one of the whole batch, by number of the layers' micro-batches.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._module, self._mesh, self._device = context.module, context.mesh, context.device
        self._stages, self._gradients, self._losses = context.stages, context.gradients, context.losses
        self._appended = AppendedLists(self._module)
        here = self._mesh.rank == self._mesh.loss_rank  # the ranks that compute losses of one batch
        self._compares = self._losses.compares and here
        self._exact = self._mesh.layout.tensor * self._mesh.layout.context == 1  # numbers: no other rank computes them
        self._mean = ReplicaMean(self._mesh, self._device)
        self._outcome: Outcome | None = None
        self._said = set[str]()  # keys that some micro-batches have not logged
        self._batches = BatchWrites()
        self._hooks = HookTables(self._module)
        self._once, follows = Parts(self._stages.runs_once), (self._module, context.layers, self._hooks)
        self._writes = LastStageWrites(*follows, lambda child: bool(child._buffers), self._once)
        arrive = context.options.gradients.weights_arrive
        known, unseen = (lambda _: True) if arrive else renormalises, writes_unseen(self._module)
        self._weights = WrittenInRuns(self._module, context.layers, known, self._mesh.layout.pipeline, unseen=unseen)
        self._outside: tuple[LastStageWrites, LastStageWrites] | None = None
        self.around: dict[int, Schedule] = {}
        self.cuts, self.drawing = Cuts(context), Drawing(context)
        self._evaluated = EvaluatedParts(context, self._writes.undone)
        self.logged = LoggedInEvaluation(context, self.cuts.trials.replicas, self._writes.undone)

    def forward(self, call: Callable[[Any], Any], batch: Any, window: Accumulation) -> Any:
        """Forward and backward of one batch by the schedule; the gradients stay out of sight until :meth:`backward`."""
        sink = self._gradients.sink
        self._stages.begin_training()
        split = self.cuts.candidates(batch)
        try:
            self.drawing.learn(call, split, "training_step")
            parts, cut = self.cuts.choose(call, batch, split, first=window.first)
            if cut.counts:
                rows = self.drawing.rows(parts)
                self.cuts.mixing.counts.run(call, batch, parts, cut.weights, cut.total, rows)
            total = cut.total * window.batches * self._mesh.layout.context  # each of whose ranks has a gradient
            scales = [weight / total * window.scale for weight in cut.weights]
            sink.begin(fresh=window.first, reduce=window.last, scale=window.scale)
            self._outcome = self._run(call, batch, parts, scales, cut, "training_step", self.cuts.asks(parts))
        except Exception as error:
            say_how_cut(error, batch, len(split))
            self._stages.note_missing(error)
            self.cuts.backwards.rest(failed=True)
            raise
        self.cuts.settle()
        self.cuts.backwards.rest()
        self.cuts.trials.note_logged(self._outcome)
        if self._outcome.loss is None:
            sink.finish()  # no backward of Lightning's follows
        else:
            sink.withdraw()
        return self._outcome.training_output()

    def backward(self, loss: Tensor, autograd: Callable[[Tensor], None], window: Accumulation) -> None:
        """Wait for the sums over replicas and publish ``.grad``; the schedule has run all backwards."""
        self._gradients.sink.finish()

    def finish(self) -> Outcome | None:
        """The outcome, once."""
        outcome, self._outcome = self._outcome, None
        self.cuts.check()
        return outcome

    def evaluate(self, call: Callable[[Any], Any], batch: Any, name: str) -> Outcome:
        """Forward of one batch through all stages; the outcome is equal on every rank of a pipeline."""
        self._stages.begin_evaluation()
        repeats = self._stages.repeats
        attempt = repeats.attempt(name) if repeats is not None else None
        outcome = self._evaluate(call, batch, name)
        if attempt is not None and repeats is not None and isinstance(outcome.output, StartOver):
            attempt.take_back()
            repeats.note(name)
            outcome = self._evaluate(call, batch, name)
        return outcome

    def _evaluate(self, call: Callable[[Any], Any], batch: Any, name: str) -> Outcome:
        chosen = self._context.options.evaluation_micro_batch_size
        parts = [batch] if chosen == "auto" else self.cuts.split(batch, chosen)
        cut = self._evaluated.cut(call, batch, parts, name) if len(parts) > 1 else None
        ways = self.logged.ways(name)
        if cut is not None:
            cut.logs = ways
            attempt = Attempt(self._module, beside=True)
            outcome = self._run(call, batch, parts, [], cut, name)
            self._stages.settle()
            if not isinstance(outcome.output, RunWhole):
                return outcome
            attempt.take_back()
            self._evaluated.note_unforeseen(name)
        cut = Cut([float(batch_size_of(batch)) if ways else 1.0], logs=ways)
        outcome = self._run(call, batch, [batch], [], cut, name)
        self._stages.settle()
        return outcome

    def _run(
        self,
        call: Callable[[Any], Any],
        batch: Any,
        parts: list[Any],
        scales: list[float],
        cut: Cut,
        name: str,
        asks: Asks | None = None,
    ) -> Outcome:
        training = bool(scales)
        repeats = self._stages.repeats
        repeated = repeats is not None and repeats.includes(name)
        apart = self.drawing.refuses(repeated=repeated) or (training and len(parts) > 1)
        own = apart or not repeated  # else it draws as one process
        passes: Callable[..., None] | None = None
        if repeats is not None and repeated:
            train = partial(repeats.train, streams=self._context.streams if own else OneStream(self._device))
            passes = train if training else repeats.run
        if self._compares:
            self._losses.take_batch(batch, name, self._device)
        rows = self.drawing.rows(cut.layers or parts)
        streams = self._context.streams.step(training=training, name=name, rows=rows) if own else nullcontext()
        over: Over = "training" if training else "evaluation"
        recording = self._context.recording.step(len(parts), cut.logs, over=over)
        with recording as recorder, streams, self._hooks.found_once():
            call = self._context.experts.ending(call) if repeats is None else call
            call = self._stages.looks(asks.hears(call) if asks is not None else call, name)
            if cut.layers:
                step = self._step_around(call, recorder, batch, scales, cut, name)
            else:
                step = self._step_in_parts(call, recorder, parts, scales, cut, name, asks, repeated=repeated)
            if cut.turns is not None:
                passes = partial(train, turns=cut.turns, asides=[recorder.elsewhere, self._context.precision.elsewhere])
            self._appended.snapshot()
            self._batches.begin(batch)
            with self._stages.running(batch, len(step.micro_batches), training=training) as executor:
                executor.run(step) if passes is None else passes(step, self._writes.undone)
            if training:
                self._gradients.sink.all_arrived()
            if name == "training_step":
                self.cuts.look()
            outcome = self._stages.outcome(partial(self._merge, step, batch, parts, recorder, cut), name)
            self._batches.apply(batch, outcome.batch)
            return outcome

    def _step_in_parts(
        self,
        call: Callable[[Any], Any],
        recorder: LogRecorder,
        parts: list[Any],
        scales: list[float],
        cut: Cut,
        name: str,
        asks: Asks | None,
        *,
        repeated: bool,
    ) -> PipelineStep:
        """A step of which each part runs on all stages."""
        training = bool(scales)
        schedule = self._context.schedule(len(parts), forward_only=not training)
        chunks = 1 if repeated else schedule.chunks
        told = self._mesh.layout.pipeline > 1  # what the step writes into its batch
        batches = self._batches if told or chunks > 1 or len(parts) > 1 else None
        recorded = Recorded(call, recorder, parts, cut, self._writes, chunks, batches, self._weights)
        run = self.cuts.mixing.counts.in_parts(recorded) if training and len(parts) > 1 else recorded
        sink, backwards = self._gradients.sink, self._context.precision.backward
        return PipelineStep(schedule, run, parts, name, scales, sink, asks, backwards=backwards)

    def _step_around(
        self,
        call: Callable[[Any], Any],
        recorder: LogRecorder,
        batch: Any,
        scales: list[float],
        cut: Cut,
        name: str,
    ) -> PipelineStep:
        """A step whose layers run in micro-batches, and the code around them on the whole batch."""
        count = len(cut.layers)
        if count not in self.around:
            self.around[count] = self._stages.schedule(count, forward_only=False, around=True)
        if self._outside is None:
            follows = self._module, self._context.layers, self._hooks, lambda _: True
            self._outside = LastStageWrites(*follows), LastStageWrites(*follows, self._once)
        schedule, last = self.around[count], self._mesh.rank == self._mesh.loss_rank
        calls = RecordedAround(
            *(call, self._context.recording, recorder, cut, self._outside),
            reaches_end=last,
            batches=self._batches,
            weights=self._weights,
            once=self._once,
        )
        whole = WholeBatch(batch, calls.before, calls.behind)
        sink, backwards = self._gradients.sink, self._context.precision.backward
        return PipelineStep(schedule, calls.layers, cut.layers, name, scales, sink, whole=whole, backwards=backwards)

    def _merge(self, step: PipelineStep, batch: Any, parts: list[Any], recorder: LogRecorder, cut: Cut) -> Outcome:
        """The outcome of the whole batch, over all replicas; on the stage that computes the loss."""
        weights = cut.weights
        outputs = [step.outputs.get(index) for index in range(len(parts))]  # none, where the step is left out
        sizes = [batch_size_of(part) for part in parts] if len(parts) > 1 else [0]
        if cut.joint is not None:
            return self._join(cut, cut.joint, step, outputs, batch, recorder)
        if not cut.once.is_known:
            self._appended.merge(weights, sizes)
        logs, loss = recorder.collect(self._device), None
        if step.name == "training_step" and step.outputs:
            losses = [loss_of(output).detach() for output in outputs]
            self._losses.note(losses)
            loss = torch.stack(losses).sum() if cut.sums else weighted_mean(losses, weights)
            if cut.total:  # of what all replicas count, rather than their mean
                loss = loss * cut.share(self._mesh.layout.data)
            entries = [output.items() if isinstance(output, Mapping) else () for output in outputs]
            outputs = [{key: value for key, value in items if key != "loss"} or None for items in entries]
        if self._compares:
            self._losses.compare(loss, step.name, self._device)
        output = merge_outputs(outputs, weights, sizes, step.name) if outputs[0] is not None else None
        written = self._batches.finish(batch, sizes, weights, step.name)
        differ = len(parts) > 1 and self._exact and recorder.differs_untold()
        unseen = self.cuts.trials.tells or self._context.streams.of_batch.asks()
        if len(parts) > 1:
            logs_partly(recorder.partly(len(parts)), self._said)
        outcome = Outcome(logs, loss, output, stop=stops(self._module), differ=differ, unseen=unseen, batch=written)
        if step.name == "training_step":
            self._mean.start(outcome, meets=True)
            self._mean.finish(outcome)
        else:
            self.logged.over_replicas(outcome, batch, step.name, recorder.numbers_logged())
        return outcome

    def _join(
        self, cut: Cut, joint: Joint, step: PipelineStep, outputs: list[Any], batch: Any, recorder: LogRecorder
    ) -> Outcome:
        """The same of micro-batches of evaluation; or that their batch has to run again."""
        unforeseen, output, logs = cut.once.unforeseen, None, no_logs(self._device)
        try:
            logs, output = recorder.collect(self._device, joint.logs(recorder)), joint.output(outputs)
        except Unforeseen as error:
            unforeseen = f"{error}"
        if self._evaluated.agreed(unforeseen):
            return Outcome(no_logs(self._device), output=RunWhole())
        if self._compares:
            self._losses.compare(None, step.name, self._device)
        sizes = list(joint.weights["sizes"])
        written = self._batches.finish(batch, [int(size) for size in sizes], sizes, step.name)
        outcome = Outcome(logs, output=output, stop=stops(self._module), batch=written)
        self.logged.over_replicas(outcome, batch, step.name, recorder.numbers_logged())
        return outcome
