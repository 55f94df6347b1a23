"""Balancing losses of the whole batch where it runs in micro-batches: a pass of counts goes before the step.

The pass is forward only, through the pipeline, with the random numbers that the step will have, and leaves nothing
behind; see :mod:`lightning_megatron.experts.balance.of_parts` for what comes of it. That the step is then the one of
the whole batch is not taken for granted: where a balancing loss is first seen, two micro-batches so prepared, and both
at once, must give the routers the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_megatron.experts.balance.balancing import BalancingLosses
from lightning_megatron.experts.balance.whole_batch import WholeBatchMixtures
from lightning_megatron.mesh.batches import map_tensors
from lightning_megatron.mesh.draws.global_rows import Rows
from lightning_megatron.mesh.messages import objects
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep
from lightning_megatron.pipeline.stage.final_state import TRIAL
from lightning_megatron.strategy.logs.batch_copies import whole_copy
from lightning_megatron.strategy.logs.step_logs import no_logs
from lightning_megatron.strategy.loss.traces import Traces
from lightning_megatron.strategy.loss.trials.gradient_trials import GradientTrial, differs
from lightning_megatron.strategy.step.step import Outcome
from lightning_megatron.strategy.step.step_context import StepContext


class CountsFirst:
    """Runs passes of counts.

    Args:
        context: what steps run on.
        known: the balancing losses that are known.
        group: the replicas; ``None`` for one, or if each replica's own loss is meant.
        may: whether batches may be cut where such a loss is made.

    Attributes:
        may: see there.
        used: whether steps in micro-batches have a pass of counts before them; equal on all ranks.
    """

    def __init__(
        self,
        context: StepContext,
        known: Sequence[BalancingLosses | WholeBatchMixtures],
        group: dist.ProcessGroup | None,
        *,
        may: bool,
    ) -> None:
        self._context, self._known, self._group, self.may = context, known, group, may
        self.used, self._said = False, False

    @contextmanager
    def aside(self, *, always: bool = False) -> Iterator[None]:
        """Around trials of what else the loss is made of: balancing losses are left out, as the same number each.

        Args:
            always: also where batches are not cut.
        """
        for known in self._known:
            known.parts.aside = self.may or always
        try:
            yield
        finally:
            for known in self._known:
                known.parts.aside = False

    @contextmanager
    def noting(self, parts: int) -> Iterator[None]:
        """Around runs of so many micro-batches: what balancing losses are given is noted, and has no gradient."""
        with ExitStack() as stack:
            for known in self._known:
                stack.enter_context(known.parts.noting(parts))
            yield
        self.at(None)

    def at(self, part: int | None) -> None:
        """Say on which micro-batch the step runs from now on."""
        for known in self._known:
            known.parts.at(part)

    def is_exact(
        self,
        call: Callable[[Any], Any],
        pieces: Sequence[Any],
        weights: Sequence[float],
        routers: Mapping[str, nn.Parameter],
        around: AbstractContextManager[Any],
        tolerance: float,
    ) -> bool:
        """Whether two micro-batches, whose counts have just been noted, are both at once. Collective over the pipeline.

        Args:
            call: the user's step, taking a (micro-)batch.
            pieces: two, and both at once.
            weights: what the two count in the mean over micro-batches.
            routers: whose gradients are looked at.
            around: each run of the step.
            tolerance: relative, of gradients.
        """
        total = sum(weights)
        self._join([total / weight for weight in weights], None)

        def at(piece: int) -> None:
            for known in self._known:
                known.parts.alone = piece == 2
            self.at(piece if piece < 2 else None)

        trial = GradientTrial(self._context, routers, around=around, at=at)
        *found, both = trial.run(call, pieces, [*(weight / total for weight in weights), 1.0])
        at(0)
        self.forget()
        return not differs(both, found, tolerance)

    def agreed(self, parts: Sequence[Any]) -> bool:
        """Whether a pass of counts goes before this step: where no replica's batch is too small to be cut. Collective
        over the replicas, if steps may have one.
        """
        if not self.used:
            return False
        if self._group is None:
            return len(parts) > 1
        return all(objects.gather(len(parts) > 1, self._group))

    def say(self) -> None:
        """Say, once, that steps have one."""
        if not self._said:
            rank_zero_info(
                "the loss holds a balancing loss of the whole batch: a pass of counts, forward only, goes before each "
                "step in micro-batches, so that the step is that of one process. `whole_batch_loss=True` runs whole "
                "batches instead."
            )
        self._said = True

    def run(
        self,
        call: Callable[[Any], Any],
        batch: Any,
        parts: Sequence[Any],
        weights: Sequence[float],
        total: float,
        rows: Sequence[Rows],
    ) -> None:
        """The pass of counts of a batch; collective over the world.

        Args:
            call: the user's step, taking a (micro-)batch.
            batch: equal on all stages of a replica.
            parts: its micro-batches.
            weights: what they count in the mean.
            total: of the weights, over all replicas.
            rows: the samples of each micro-batch.
        """
        context, stages = self._context, self._context.stages
        traces = Traces(context.module, beside=True)
        call = context.experts.ending(call) if stages.repeats is None else call

        def noted(part: Any, index: int) -> Any:
            eager = torch.compiler.set_stance("force_eager")  # a layer first compiled here would stay uncompiled later
            self.at(index)
            try:
                with context.recording.aside(), traces.noted(), eager:
                    return map_tensors(call(whole_copy(part)), torch.detach)
            finally:
                self.at(None)
                with torch._C.DisableTorchFunction():  # a step that is watched must not read what other stages have
                    traces.put_back()

        step = PipelineStep(context.schedule(len(parts), forward_only=True), noted, parts, TRIAL)
        before, running = context.streams.before_step(rows), stages.running(batch, len(parts), training=False)
        with self.noting(len(parts)), before, context.tries(), running as executor:
            executor.run(step)
        stages.outcome(lambda: Outcome(no_logs(context.device)), TRIAL)
        stages.settle()
        own = total if self._group is not None else sum(weights)
        self._join([own / weight for weight in weights], self._group)

    def in_parts(self, call: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """The step on a micro-batch, whose balancing losses are those of the whole batch."""

        def run(part: Any, index: int) -> Any:
            self.at(index)
            try:
                return call(part, index)
            finally:  # a stage ends its run by raising
                self.at(None)

        return run if self.may else call

    def forget(self) -> None:
        """Forget the notes."""
        for known in self._known:
            known.parts.alone = False
            known.parts.forget()

    def _join(self, factors: list[float], group: dist.ProcessGroup | None) -> None:
        for known in self._known:
            known.join(factors, group)
