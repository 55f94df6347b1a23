"""Evaluation in micro-batches: finds out by trying how what they give comes together, or keeps batches whole.

Nothing says that a number which ``validation_step`` logs or returns is a mean over samples. So before the first batch
of each kind of step is cut (``evaluation_micro_batch_size=``), some neighbouring micro-batches run apart and together,
as they do to find out about a loss::

    trial      F0 F1 F01 F2 F12       what they return, log and write on the module    ──▶ means, sums, rows, ...
    batch      F0 F1 F2 F3            put together as found
    or         F                      where that cannot be, said once

What no trial has seen is noticed in the batch that shows it: all is put back, and this batch runs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.mesh.batches import batch_size_of, look_of
from lightning_megatron.mesh.draws.same_draws import Drawn, SameDraws
from lightning_megatron.mesh.messages import objects
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep
from lightning_megatron.pipeline.stage.final_state import tried
from lightning_megatron.strategy.generation.repeats import StartOver
from lightning_megatron.strategy.logs.joined import Joined, Joint, NotJoinable
from lightning_megatron.strategy.logs.step_logs import no_logs
from lightning_megatron.strategy.loss.counted import Extremes, candidates
from lightning_megatron.strategy.loss.cuts import Cut
from lightning_megatron.strategy.loss.once import OncePerBatch
from lightning_megatron.strategy.loss.traces import Traces
from lightning_megatron.strategy.loss.trials.joined_pieces import Joins, is_small
from lightning_megatron.strategy.loss.trials.pieces_tried import Tried
from lightning_megatron.strategy.loss.written import Written
from lightning_megatron.strategy.step.step import Outcome
from lightning_megatron.strategy.step.step_context import StepContext

_AGAIN = 8  # factor between the batches in which it is tried anyhow
_UNSETTLED = 16  # batches in which what tells nothing is tried again
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5}
_NARROW = 2e-3

_Told = tuple[str, bool, Drawn]
"""What a step writes that only the whole batch can, or ""; whether that may yet show; what it draws."""


class RunWhole(StartOver):
    """The outcome of micro-batches that gave something unforeseen: their batch has to run again, whole."""


@dataclass
class _Known:
    """Facts about one kind of step, equal on all ranks of a replica but for ``joined``.

    Attributes:
        joined: how values come together; on the ranks that compute the loss.
        whole: why its batches run whole, or "".
        count: batches so far.
        next: when it is tried again.
        tried_anew: trials that could not tell.
        pending: whether the last trial could not tell, or a batch gave what was not foreseen.
        open: ways to weigh that were not told apart.
        looks: what batches that were tried look like.
        extremes: of their integers.
        written: values that the step writes.
        once: likewise, to be used.
    """

    joined: Joined = field(default_factory=Joined)
    whole: str = ""
    count: int = 0
    next: int = 1
    tried_anew: int = 0
    pending: bool = True
    open: set[Any] = field(default_factory=set)
    looks: set[Any] = field(default_factory=set)
    extremes: Extremes = field(default_factory=Extremes)
    written: Written = field(default_factory=Written)
    once: OncePerBatch = field(default_factory=OncePerBatch)


class EvaluatedParts:
    """Knows the steps of evaluation that run in micro-batches.

    Args:
        context: what steps run on.
        undone: takes back what a run writes, on the stages that hear of it from the one that computes the loss.
    """

    def __init__(self, context: StepContext, undone: Callable[..., Any]) -> None:
        self._context, self._undone = context, undone
        self._known: dict[str, _Known] = {}

    def cut(self, call: Callable[[Any], Any], batch: Any, parts: Sequence[Any], name: str) -> Cut | None:
        """How the micro-batches of a batch come together; ``None`` where it has to run whole. Runs a trial where due.

        Args:
            call: the user's step, taking a (micro-)batch.
            batch: the whole.
            parts: its micro-batches, two or more.
            name: of the user's step.
        """
        known = self._known.setdefault(name, _Known())
        known.count += 1
        if known.whole:
            return None
        look, unlike = look_of(batch), self._unlike(known, parts)
        beyond = known.extremes.grow(batch)
        unlike |= beyond is not None
        due = known.pending or look not in known.looks or known.count >= known.next or unlike
        if self._agree(due):
            known.looks.add(look)
            if known.count >= known.next:
                known.next = known.count * _AGAIN
            self._try(known, call, batch, parts, name, beyond)
        if self._agree(bool(known.whole) or known.pending or self._unlike(known, parts)):
            return None
        weights = _weights(batch, parts)
        return Cut(list(weights["sizes"]), once=known.once, joint=Joint(known.joined, weights))

    def note_unforeseen(self, name: str) -> None:
        """Say that micro-batches gave what no trial has seen; equal on all ranks of a replica."""
        self._known[name].pending = True

    def agreed(self, unforeseen: str) -> str:
        """Why a batch has to run again; with experts on several replicas, which run alike, on any of them."""
        if self._context.options.gradients.experts == 1:
            return unforeseen
        return max(objects.gather(unforeseen, self._context.mesh.group("data_parallel")))

    def _agree(self, needed: bool) -> bool:
        """Likewise of any other answer."""
        if self._context.options.gradients.experts == 1:
            return needed
        return any(objects.gather(needed, self._context.mesh.group("data_parallel")))

    @staticmethod
    def _unlike(known: _Known, parts: Sequence[Any]) -> bool:
        """Whether ways to weigh that were not told apart would give other weights in this batch."""
        ways = [batch_size_of if way == "sizes" else way for way in known.open]
        shares = {tuple(round(x / (sum(w) or 1.0), 9) for x in w) for w in ([way(p) for p in parts] for way in ways)}
        return len(shares) > 1

    def _try(
        self,
        known: _Known,
        call: Callable[[Any], Any],
        batch: Any,
        parts: Sequence[Any],
        name: str,
        beyond: int | None = None,
    ) -> None:
        context, stages = self._context, self._context.stages
        joins = Joins(batch, parts, beyond, small=not self._agree(not is_small(batch)))
        traces = Traces(context.module, beside=True)
        foreign = context.streams.is_foreign
        run = Tried(call, context.recording, traces, joins, stages, counts_as=2, draws=SameDraws(joins.joins, foreign))
        step = PipelineStep(context.schedule(len(joins.pieces), forward_only=True), run, joins.pieces, tried(name))
        checked = max(joins.pieces, key=batch_size_of), len(joins.pieces)
        repeats = stages.repeats
        passes = repeats.run if repeats is not None and repeats.includes(name) else None
        trial = context.streams.trial(name, rows=joins.rows())
        with trial, stages.running(*checked, training=False) as executor:
            executor.run(step) if passes is None else passes(step, self._undone)
        kinds, writes, unsure, _ = verdict = run.written(context.layers)
        writes = known.written.note(verdict) or writes
        outcome = stages.outcome(partial(self._found, known, step, run, joins), tried(name))
        stages.settle()
        if isinstance(outcome.output, StartOver) and repeats is not None:
            repeats.note(name)
            self._try(known, call, batch, parts, name, beyond)
            return
        why, undecided, known.open = outcome.output
        told = self._told_by_all((writes, unsure or bool(known.written.undecided), run.drawn()))
        context.streams.learn([draws for *_, draws in told], training=False)
        for key, place in zip(kinds, traces.tables(list(kinds)), strict=True):
            known.written.learn(key, kinds[key], place, run.turn(key, context.layers, context.stages.runs_once))
        run.tell()
        slots, plain = list(known.written.slots.values()), traces.plain(context.layers)
        last = context.mesh.rank == context.mesh.loss_rank
        known.once = OncePerBatch(context.module, slots, plain, name, may_run_again=last)
        self._judge(known, name, why, undecided, told)

    def _told_by_all(self, mine: _Told) -> list[_Told]:
        """Facts of a trial on all ranks that run the same batch together."""
        told = [mine]
        world = self._context.options.gradients.experts > 1
        for axis in ("world",) if world else ("tensor_parallel", "context_parallel", "pipeline_parallel"):
            told = [each for some in objects.gather(told, self._context.mesh.group(axis)) for each in some]
        return told

    @staticmethod
    def _judge(known: _Known, name: str, why: str, undecided: bool, told: Sequence[_Told]) -> None:
        """Whether batches run whole from here on, which is said, or this step is to be tried again."""
        written = next((writes for writes, *_ in told if writes), "")
        drawn = next((draws.apart for *_, draws in told if draws.apart), "")
        known.pending = undecided or any(unsure for _, unsure, _ in told)
        known.tried_anew += known.pending
        known.whole = why or (f"it writes `{written}`, as only the whole batch can" if written else "")
        known.whole = known.whole or (f"it draws {drawn}" if drawn else "")
        if not known.whole and known.pending and known.tried_anew >= _UNSETTLED:
            known.whole = "how what it gives comes together does not show"
        if known.whole:
            rank_zero_info(
                f"`{name}` runs each batch whole, as without `evaluation_micro_batch_size`: {known.whole}. Means over "
                "samples, sums, outputs with a row per sample and torchmetrics objects let it run in micro-batches."
            )

    def _found(self, known: _Known, step: PipelineStep, run: Tried, joins: Joins) -> Outcome:
        """Why the batch has to run whole, whether more has to be seen, and which weights were not told apart."""
        why = f"it does not run on few samples ({run.failed})" if run.failed else ""
        if not why:
            narrow = torch.is_autocast_enabled(self._context.device.type)
            tolerance = _NARROW if narrow else _TOLERANCE[torch.float32 if run.draws.narrow else torch.float64]
            nests = [
                {"log": recorder.numbers(1)[0] if recorder is not None else {}, "output": step.outputs[index]}
                for index, recorder in enumerate(run.recorders)
            ]
            try:
                for both, places in joins.joins.items():
                    weights = _weights(joins.pieces[both], [joins.pieces[place] for place in places])
                    known.joined.learn([nests[place] for place in places], nests[both], weights, tolerance)
            except NotJoinable as error:
                why = f"{error} is not made of what micro-batches give"
        found = why, any(True for _ in known.joined.open()), known.joined.counted()
        world = self._context.options.gradients.experts > 1
        for axis in (*(("data_parallel",) if world else ()), "context_parallel", "tensor_parallel"):
            every = objects.gather(found, self._context.mesh.group(axis))
            why = next((why for why, *_ in every if why), "")
            found = why, any(undecided for _, undecided, _ in every), set().union(*(ways for *_, ways in every))
        return Outcome(no_logs(self._context.device), output=found)


def _weights(batch: Any, parts: Sequence[Any]) -> dict[Any, Sequence[float]]:
    weights: dict[Any, Sequence[float]] = {"sizes": [float(batch_size_of(part)) for part in parts]}
    return weights | {way: [way(part) for part in parts] for way in candidates(batch, *parts)}
