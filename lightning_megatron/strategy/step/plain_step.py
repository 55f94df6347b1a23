"""A step of one stage and one micro-batch: Lightning runs the backward, as in one process.

Only the gradients are summed over ranks. What the replicas logged travels during the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from lightning_megatron.mesh.batches import batch_size_of
from lightning_megatron.strategy.evaluation.logged import LoggedInEvaluation
from lightning_megatron.strategy.lightning.trainer_access import skips_backward, stops
from lightning_megatron.strategy.logs.combining import counts_for
from lightning_megatron.strategy.logs.recorded_step import shares_of
from lightning_megatron.strategy.loss.cuts import Cuts
from lightning_megatron.strategy.step.by_hand import BackwardsByHand, GradientsTaken, WeightCopies
from lightning_megatron.strategy.step.replica_mean import ReplicaMean
from lightning_megatron.strategy.step.step import Accumulation, Outcome
from lightning_megatron.strategy.step.step_context import StepContext

_NOTHING: AbstractContextManager[None] = nullcontext()


class PlainStep:
    """Runs the user's step on whole batches; see :class:`~lightning_megatron.strategy.step.step.Step`.

    Args:
        context: what steps run on, with one stage.
        copies: weights that tensor-parallel ranks hold whole, looked at where a step has updated them itself.
        cuts: tell what the loss of a replica counts.
        logged: tells how what steps of evaluation log combines over the replicas.
        tries: whether this step asks them, rather than one around it.
    """

    def __init__(
        self,
        context: StepContext,
        cuts: Cuts,
        logged: LoggedInEvaluation,
        copies: WeightCopies | None = None,
        *,
        tries: bool = True,
    ) -> None:
        self._module, self._device, mesh = context.module, context.device, context.mesh
        self._replicas = mesh.layout.data * mesh.layout.context  # of which each has a gradient
        self._alone, self._logs_alone = mesh.layout.data == 1, mesh.layout.world_size == 1
        self._gradients, self._recording, self._losses = context.gradients, context.recording, context.losses
        self._experts = context.experts
        self._copies, self._cuts, self._tries, self._logged = copies, cuts, tries, logged
        self._share, self._data = 1.0, mesh.layout.data
        self._mean = ReplicaMean(mesh, self._device)
        self._outcome: Outcome | None = None
        self._awaits_backward = False
        self._window = Accumulation()
        self._backwards = BackwardsByHand(self._summing, lambda: self._gradients.shows_parts())
        self._taken = GradientsTaken(context.replicas_told)

    def forward(self, call: Callable[[Any], Any], batch: Any, window: Accumulation) -> Any:
        """Forward of one batch; the output keeps its graph."""
        self._outcome = None
        batch, cut = self._cuts.uncut(call, batch, first=window.first) if self._tries else (batch, self._cuts.latest)
        self._share = cut.share(self._data)
        automatic, self._window = self._module.automatic_optimization, window
        compares = self._losses.compares
        if compares:
            self._losses.take_batch(batch, "training_step", self._device)
        recording = self._recording.step(1, cut.logs, alone=self._logs_alone, over="training")
        by_hand = (_NOTHING, _NOTHING) if automatic else (self._backwards, self._taken)
        with recording as recorder, by_hand[0], by_hand[1]:
            shares = shares_of(recorder, [batch])[0]
            if cut.logs or self._cuts.weighs or shares:
                recorder.begin_micro_batch(cut.weights[0], counts_for(cut.logs, batch)[0], shares)
            output = self._experts.joining(call)(batch)
            unseen = self._cuts.trials.tells
            outcome = Outcome(recorder.collect(self._device), stop=stops(self._module), unseen=unseen)
        self._cuts.settle()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if compares:
            compared = loss.detach() if isinstance(loss, Tensor) and automatic else None
            self._losses.compare(compared, "training_step", self._device)
        if not automatic and self._copies is not None:
            self._copies.compare()
        if automatic and not self._alone and isinstance(loss, Tensor) and loss.numel() == 1:
            outcome.loss = loss.detach().reshape(()) * self._share
        self._mean.start(outcome, meets=True)
        skips = skips_backward(self._module) or (output is None and self._alone)
        if skips and automatic and self._gradients.buckets is not None:
            with self._summing():  # nothing: the update finds no gradients of this batch
                pass
        self._outcome = outcome
        self._awaits_backward = automatic and output is not None and not skips
        return self._weighed(output) if automatic and self._share != 1.0 else output

    def _weighed(self, output: Any) -> Any:
        """Result of the step, with a loss whose mean over the replicas is that of all samples."""
        if isinstance(output, Mapping):
            return {**output, "loss": output["loss"] * self._share} if "loss" in output else output
        return output * self._share if isinstance(output, Tensor) else output

    def backward(self, loss: Tensor, autograd: Callable[[Tensor], None], window: Accumulation) -> None:
        """Backward by Lightning, with sums over replicas while it runs; any number of times if the user calls it."""
        self._losses.note([loss.detach()])
        self._window = window
        scale = window.scale if self._module.automatic_optimization else self._share * window.scale
        self._backwards.summed(autograd, loss if scale == 1.0 else loss * scale)
        self._awaits_backward = False

    @contextmanager
    def _summing(self) -> Iterator[None]:
        """Around a backward, after which the gradients are summed over the ranks that share a parameter."""
        sink, window = self._gradients.sink, self._window
        # Unless gradients end up in shards, `zero_grad` is in the user's hands, and `.grad` tells what to add to.
        fresh = window.first if sink.scatters else None
        sink.begin(fresh=fresh, reduce=window.last, divide_by=self._replicas, scale=window.scale, once=True)
        sink.set_final(True)
        yield
        sink.finish()

    def finish(self) -> Outcome | None:
        """The outcome with the logs of all replicas, once the backward has run, or where none will follow."""
        if self._outcome is None or self._awaits_backward:
            return None
        outcome, self._outcome = self._outcome, None
        self._mean.finish(outcome)
        if not self._alone:
            self._cuts.check()
            self._cuts.trials.note_logged(outcome)
        return outcome

    def evaluate(self, call: Callable[[Any], Any], batch: Any, name: str) -> Outcome:
        """Forward of one batch, whole."""
        compares = self._losses.compares
        if compares:
            self._losses.take_batch(batch, name, self._device)
        ways = self._logged.ways(name)
        with self._recording.step(1, ways, alone=self._logs_alone, over="evaluation") as recorder:
            if ways:
                recorder.begin_micro_batch(float(batch_size_of(batch)), counts_for(ways, batch)[0])
            output = self._experts.ending(call)(batch)
            if compares:
                self._losses.compare(None, name, self._device)
            outcome = Outcome(recorder.collect(self._device), output=output)
            self._logged.over_replicas(outcome, batch, name, recorder.numbers_logged())
        return outcome
