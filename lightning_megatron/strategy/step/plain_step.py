"""A step whose code runs once, on a whole batch: Lightning runs its backwards, or the code itself does.

On one stage it is that of one process, and only gradients are summed over ranks; through several, which manual
optimization runs so, what Lightning calls a backward ends a pass (:mod:`.by_hand`). What the replicas logged travels
during the backward::

    PlainStep      choose ─▶ record [ run the code ─▶ backward, any number of times ] ─▶ outcome
    OneStageRun    the trials' weight           autograd's, summed                       this rank's
    StagesRun      1                            a pass through the stages                from where the loss is
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from lightning_megatron.mesh.batches import batch_size_of, map_tensors
from lightning_megatron.pipeline.elsewhere.away import refuse_away
from lightning_megatron.strategy.evaluation.logged import LoggedInEvaluation
from lightning_megatron.strategy.lightning.trainer_access import skips_backward, stops
from lightning_megatron.strategy.logs.combining import counts_for
from lightning_megatron.strategy.logs.recorded_step import shares_of
from lightning_megatron.strategy.logs.step_logs import LogRecorder
from lightning_megatron.strategy.loss.cuts import Cut, Cuts
from lightning_megatron.strategy.step.among_stages import OneStage
from lightning_megatron.strategy.step.by_hand import BackwardsByHand, GradientsTaken, WeightCopies
from lightning_megatron.strategy.step.drawn_steps import Drawing
from lightning_megatron.strategy.step.replica_mean import ReplicaMean
from lightning_megatron.strategy.step.step import Accumulation, Outcome
from lightning_megatron.strategy.step.step_context import StepContext

_NOTHING: AbstractContextManager[None] = nullcontext()


class WholeRun(Protocol):
    """The user's code, run once on a whole batch, on one stage or through several.

    Attributes:
        has_loss: whether this rank computes the loss.
        delivers: whether the outcome is the same on several stages, one of which computes it.
    """

    has_loss: bool
    delivers: bool

    def choose(self, call: Callable[[Any], Any], batch: Any, *, first: bool) -> tuple[Any, Cut]:
        """The batch that runs, and its weight beside those of the other replicas; before each training step.

        Args:
            call: the user's step.
            batch: equal on all stages of a replica.
            first: whether no gradients have been collected for the next update.
        """

    def drawing(self, batch: Any, name: str, *, training: bool) -> AbstractContextManager[None]:
        """Around all that the step draws; ``name`` is that of the user's step."""

    def running(self, batch: Any, window: Accumulation) -> AbstractContextManager[None]:
        """Around the user's training step."""

    def backward(self, loss: Tensor, autograd: Callable[[Tensor], None], window: Accumulation, scale: float) -> None:
        """Leave the summed gradients of the loss, times ``scale``; see :meth:`.Step.backward`."""

    def leave_out(self, window: Accumulation) -> None:
        """In the place of a backward: the update finds no gradients of this batch."""

    def between_passes(self) -> AbstractContextManager[None]:
        """See :class:`~lightning_megatron.strategy.step.engine.StepEngine`."""

    def check(self, outcome: Outcome) -> None:
        """Compare the outcome, equal on all stages, with what this one has seen."""


class OneStageRun:
    """The same on one stage, as in one process; see :class:`WholeRun`.

    Args:
        context: what steps run on.
        stages: the one that there is.
        cuts: tell what the loss of a replica counts.
        drawing: tells whose samples draws are for.
    """

    has_loss, delivers = True, False

    def __init__(self, context: StepContext, stages: OneStage, cuts: Cuts, drawing: Drawing) -> None:
        self._gradients, self._losses, self._cuts = context.gradients, context.losses, cuts
        self._streams, self._stages, self._drawing = context.streams, stages, drawing
        layout = context.mesh.layout
        self._ranks = layout.data * layout.context  # of which each has a gradient
        self._automatic, self._draws = context.module.automatic_optimization, context.streams.draws is not None
        self._window = Accumulation()
        self._backwards = BackwardsByHand(self._summing, lambda: self._gradients.shows_parts())
        self._taken = GradientsTaken(context.replicas_told)

    def choose(self, call: Callable[[Any], Any], batch: Any, *, first: bool) -> tuple[Any, Cut]:
        """See :class:`WholeRun`; tries the step where need be."""
        self._drawing.learn(call, [batch], "training_step")
        return self._cuts.uncut(call, batch, first=first)

    def drawing(self, batch: Any, name: str, *, training: bool) -> AbstractContextManager[None]:
        """Layers draw from streams of their own where draws come from counters."""
        return self._drawn(batch, name, training=training) if self._draws else _NOTHING

    @contextmanager
    def _drawn(self, batch: Any, name: str, *, training: bool) -> Iterator[None]:
        rows = self._drawing.rows([batch])
        with self._streams.step(training=training, name=name, rows=rows), self._stages.segments():
            yield

    def running(self, batch: Any, window: Accumulation) -> AbstractContextManager[None]:
        """Backwards of the user's own are summed."""
        self._window = window
        return _NOTHING if self._automatic else self._by_hand()

    @contextmanager
    def _by_hand(self) -> Iterator[None]:
        with self._backwards, self._taken:
            yield

    def backward(self, loss: Tensor, autograd: Callable[[Tensor], None], window: Accumulation, scale: float) -> None:
        """By autograd, with sums over ranks while it runs; layers that are computed again draw again."""
        self._window = window
        self._losses.note([loss.detach()])
        with self._drawn_again() if self._draws else _NOTHING:
            self._backwards.summed(autograd, loss if scale == 1.0 else loss * scale)

    @contextmanager
    def _drawn_again(self) -> Iterator[None]:
        with self._stages.segments(again=True), self._streams.again():
            yield

    def leave_out(self, window: Accumulation) -> None:
        """See :class:`WholeRun`."""
        self._window = window
        if self._gradients.buckets is not None:
            with self._summing():
                pass

    @contextmanager
    def _summing(self) -> Iterator[None]:
        """Around a backward, after which the gradients are summed over the ranks that share a parameter."""
        sink, window = self._gradients.sink, self._window
        # Unless gradients end up in shards, `zero_grad` is in the user's hands, and `.grad` tells what to add to.
        fresh = window.first if sink.scatters else None
        sink.begin(fresh=fresh, reduce=window.last, divide_by=self._ranks, scale=window.scale, once=True)
        sink.set_final(True)
        yield
        sink.finish()

    def between_passes(self) -> AbstractContextManager[None]:
        """Nothing of the module is elsewhere."""
        return _NOTHING

    def check(self, outcome: Outcome) -> None:
        """It is this stage's own."""


class PlainStep:
    """Runs the user's step on whole batches; see :class:`~lightning_megatron.strategy.step.step.Step`.

    Args:
        context: what steps run on.
        run: of the code, on one stage or through several.
        cuts: compare what replicas write.
        logged: tells how what steps of evaluation log combines over the replicas.
        copies: weights that tensor-parallel ranks hold whole, looked at where a step has updated them itself.
    """

    def __init__(
        self,
        context: StepContext,
        run: WholeRun,
        cuts: Cuts,
        logged: LoggedInEvaluation,
        copies: WeightCopies | None = None,
    ) -> None:
        self._module, self._device, mesh = context.module, context.device, context.mesh
        self._alone, self._logs_alone = mesh.layout.data == 1, mesh.layout.world_size == 1
        self._recording, self._losses, self._experts = context.recording, context.losses, context.experts
        self._stages, self._run, self._cuts, self._logged, self._copies = context.stages, run, cuts, logged, copies
        self._share, self._data = 1.0, mesh.layout.data
        self._mean = ReplicaMean(mesh, self._device)
        self._outcome: Outcome | None = None
        self._awaits_backward = False

    def forward(self, call: Callable[[Any], Any], batch: Any, window: Accumulation) -> Any:
        """Forward of one batch; on one stage the output keeps its graph."""
        self._outcome = None
        batch, cut = self._run.choose(call, batch, first=window.first)
        self._share = cut.share(self._data)
        automatic = self._module.automatic_optimization
        compares = self._losses.compares and self._run.has_loss
        if compares:
            self._losses.take_batch(batch, "training_step", self._device)
        recording = self._recording.step(1, cut.logs, alone=self._logs_alone, over="training")
        with recording as recorder, self._run.drawing(batch, "training_step", training=True):
            shares = shares_of(recorder, [batch])[0]
            if cut.logs or self._cuts.weighs or shares:
                recorder.begin_micro_batch(cut.weights[0], counts_for(cut.logs, batch)[0], shares)
            with self._run.running(batch, window):
                output = self._experts.joining(call)(batch)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if compares:
                compared = loss.detach() if isinstance(loss, Tensor) and automatic else None
                self._losses.compare(compared, "training_step", self._device)
            self._cuts.look()
            told = loss if automatic and not self._alone else None
            outcome = self._stages.outcome(lambda: self._collect(recorder, output, told), "training_step")
        self._cuts.settle()
        self._run.check(outcome)
        if not automatic and self._copies is not None:
            self._copies.compare()
        skips = skips_backward(self._module) or (output is None and self._alone)
        if skips and automatic:
            self._run.leave_out(window)
        self._outcome = outcome
        self._awaits_backward = automatic and output is not None and not skips
        if self._run.delivers:
            return outcome.output
        return self._weighed(output) if automatic and self._share != 1.0 else output

    def _collect(self, recorder: LogRecorder, output: Any, loss: Any) -> Outcome:
        """The outcome, on its way over the replicas; it is there where other stages are to have it."""
        unseen = self._cuts.trials.tells
        outcome = Outcome(recorder.collect(self._device), stop=stops(self._module), unseen=unseen)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            outcome.loss = loss.detach().reshape(()) * self._share
        if self._run.delivers:
            refuse_away(output, "what `training_step` returned")
            outcome.output = map_tensors(output, Tensor.detach)
        self._mean.start(outcome, meets=True)
        if self._run.delivers:
            self._mean.finish(outcome)
        return outcome

    def _weighed(self, output: Any) -> Any:
        """Result of the step, with a loss whose mean over the replicas is that of all samples."""
        if isinstance(output, Mapping):
            return {**output, "loss": output["loss"] * self._share} if "loss" in output else output
        return output * self._share if isinstance(output, Tensor) else output

    def backward(self, loss: Tensor, autograd: Callable[[Tensor], None], window: Accumulation) -> None:
        """Backward by Lightning, or the end of a pass; any number of times if the user calls it."""
        scale = window.scale if self._module.automatic_optimization else self._share * window.scale
        self._run.backward(loss, autograd, window, scale)
        self._awaits_backward = False

    def finish(self) -> Outcome | None:
        """The outcome with the logs of all replicas, once the backward has run, or where none will follow."""
        if self._outcome is None or self._awaits_backward:
            return None
        outcome, self._outcome = self._outcome, None
        if not self._run.delivers:
            self._mean.finish(outcome)
        if not self._alone:
            self._cuts.check()
            self._cuts.trials.note_logged(outcome)
        return outcome

    def evaluate(self, call: Callable[[Any], Any], batch: Any, name: str) -> Outcome:
        """Forward of one batch, whole, on one stage."""
        compares = self._losses.compares
        if compares:
            self._losses.take_batch(batch, name, self._device)
        ways = self._logged.ways(name)
        recording = self._recording.step(1, ways, alone=self._logs_alone, over="evaluation")
        with self._run.drawing(batch, name, training=False), recording as recorder:
            if ways:
                recorder.begin_micro_batch(float(batch_size_of(batch)), counts_for(ways, batch)[0])
            output = self._experts.ending(call)(batch)
            if compares:
                self._losses.compare(None, name, self._device)
            outcome = Outcome(recorder.collect(self._device), output=output)
            self._logged.over_replicas(outcome, batch, name, recorder.numbers_logged())
        return outcome
