"""Random numbers of one process at any layout: what steps tell :class:`~..mesh.draws.mode.LayoutDraws` of batches.

Before the first step whose samples ranks or micro-batches share, the step runs forward on one micro-batch, and on the
same samples twice over. That shows which of its draws have an entry for each sample::

    trial      F(s0 s1)  F(s0 s1 s0 s1)      shapes of all draws, in both       ──▶ where the samples are
    step       F(s0 s1) B  F(s2 s3) B ...    draws of samples 0 1, then 2 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_megatron.mesh.batches import batch_size_of
from lightning_megatron.mesh.draws.global_rows import Deal, Rows
from lightning_megatron.mesh.draws.places import Lesson
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep
from lightning_megatron.pipeline.stage.final_state import TRIAL
from lightning_megatron.strategy.data.joined_batches import joined_batches
from lightning_megatron.strategy.generation.repeats import StartOver
from lightning_megatron.strategy.lightning.samplers import deals_in_turns
from lightning_megatron.strategy.logs.batch_copies import whole_copy
from lightning_megatron.strategy.logs.step_logs import no_logs
from lightning_megatron.strategy.loss.traces import Traces
from lightning_megatron.strategy.loss.trials.pieces_tried import Tried
from lightning_megatron.strategy.step.step import Outcome
from lightning_megatron.strategy.step.step_context import StepContext

_REPEATED = "the step calls the model repeatedly, and stages run only their part of each call"


class _Pieces(NamedTuple):
    """Runs of a trial of draws."""

    pieces: list[Any]
    joins: dict[int, tuple[int, ...]]


class Drawing:
    """Assigns samples to the micro-batches of a step, and knows what was learned of the step's draws.

    Args:
        context: what steps run on.
    """

    def __init__(self, context: StepContext) -> None:
        self._context, self._streams = context, context.streams
        self._coordinates, self._replicas = context.mesh.coordinates, context.mesh.layout.data

    def rows(self, parts: Sequence[Any]) -> list[Rows]:
        """The samples of each micro-batch.

        Args:
            parts: the micro-batches of a batch of this replica.
        """
        if self._streams.draws is None:
            return [Rows(0, 1, 1)]
        in_turns = self._replicas > 1 and deals_in_turns(self._context.module)
        return Deal(self._coordinates.data, self._replicas, in_turns).rows([batch_size_of(part) for part in parts])

    def refuses(self, *, repeated: bool) -> bool:
        """Refuse draws of a step that calls the model repeatedly through stages; whether anything answers draws."""
        if self._streams.draws is None:
            return False
        self._streams.draws.next_refused = _REPEATED if repeated else ""
        return True

    def learn(self, call: Callable[[Any], Any], parts: Sequence[Any], name: str) -> None:
        """Find out where the draws of a step have its samples, once, where not all of them are here.

        Args:
            call: the user's step, taking a (micro-)batch.
            parts: the micro-batches of a batch of this replica.
            name: of the user's step.

        Raises:
            RuntimeError: a draw that cannot be the same in any layout.
        """
        draws = self._streams.draws
        if draws is None or draws.knows(name) or (len(parts) == 1 and self._replicas == 1):
            return
        stages = self._context.stages
        pieces = [whole_copy(piece) for piece in (parts[0], joined_batches(parts[0], parts[0]))]
        tried = Tried(
            call, self._context.recording, Traces(self._context.module, beside=True), _Pieces(pieces, {}), stages
        )
        lesson = draws.lesson = Lesson(batch_size_of(parts[0]))

        def run(part: Any, index: int) -> Any:
            lesson.run = index
            return tried(part, index)

        try:
            for lesson.large in (False, True):
                step = PipelineStep(self._context.schedule(2, forward_only=True), run, pieces, TRIAL)
                running = stages.running(pieces[1], 2, training=False)
                with self._streams.trial(name), self._context.tries(), running as executor:
                    executor.run(step)
                outcome = stages.outcome(lambda: Outcome(no_logs(self._context.device)), TRIAL)
                stages.settle()
                missed = "" if isinstance(outcome.output, StartOver) else lesson.left_over()
                if missed:
                    draws.refuse(missed, "how often it does depends on the number of samples")
        finally:
            draws.lesson = None
        draws.learn(name, lesson)
