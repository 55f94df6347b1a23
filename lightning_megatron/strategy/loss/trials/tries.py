"""Trying a step on parts of a batch before it is run, to learn what the loss of the batch is made of.

Some neighbouring micro-batches, and each two of them at once, go through the pipeline, forward only, with the same
random numbers for the same samples, and what the step writes and logs is put back and forgotten::

    trial      F0 F1 F01 F2 F12 ...    losses of each, and of two    ──▶ how to weigh; or keep the batch whole
    step       F0 B0 F1 B1 ...         as found

Two at once, and not all: a trial holds no more than a step would. Several times two: a loss divided by the number of
its positives looks like a mean where two micro-batches have as many. All of a small batch (:mod:`.joined_pieces`).

It is done in the first step, and again where the answer may be another one: as long as equal losses tell nothing, when
the batch looks different, when something new is logged or a logged number first differs between micro-batches, when a
batch first has ignored targets or integers beyond earlier ones, and now and then (steps 8, 64, ...; 2 and 4 where few).

Where there are replicas, a batch that runs uncut is tried on parts as well (:mod:`.over_replicas`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from lightning_megatron.mesh.batches import batch_size_of, look_of
from lightning_megatron.mesh.draws.global_rows import Deal
from lightning_megatron.mesh.draws.same_draws import SameDraws
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep, loss_of
from lightning_megatron.pipeline.stage.final_state import TRIAL
from lightning_megatron.strategy.carried.rows_of_samples import NOTHING_KEPT
from lightning_megatron.strategy.generation.middle import Exchanged, Middle
from lightning_megatron.strategy.generation.repeats import StartOver
from lightning_megatron.strategy.hooks.phases import Phases
from lightning_megatron.strategy.logs.step_logs import StepLogs
from lightning_megatron.strategy.loss import said
from lightning_megatron.strategy.loss.apart import AroundTrial
from lightning_megatron.strategy.loss.class_weights import bind, class_weights_of
from lightning_megatron.strategy.loss.counted import Counted, Extremes, Untold, unlike_weights
from lightning_megatron.strategy.loss.once import OncePerBatch
from lightning_megatron.strategy.loss.over_replicas import OverReplicas, SeesGroup
from lightning_megatron.strategy.loss.tables import Name, sendable, spelled
from lightning_megatron.strategy.loss.traces import Traces, without_zero_weights
from lightning_megatron.strategy.loss.trials.joined_pieces import Joins, TriedParts
from lightning_megatron.strategy.loss.trials.meetings import Meetings
from lightning_megatron.strategy.loss.trials.pieces_tried import ToldOfTrial, Tried, next_try
from lightning_megatron.strategy.loss.trials.samples_apart import all_of, joins_of, sharing
from lightning_megatron.strategy.loss.weighing import Finding, Reading, TrialRun, narrowest
from lightning_megatron.strategy.loss.written import Kinds, Written, without_anew
from lightning_megatron.strategy.step.step import Outcome
from lightning_megatron.strategy.step.step_context import StepContext

_EARLY = 8  # steps before which it is tried more often, where few micro-batches are
_UNSETTLED = 16  # steps in which equal losses are tried again
_LATE = ("time", "keys", "other")  # why a step is tried that may not be the first of its kind
_ROUNDED = (1, 3, 15, 31)  # steps after which logged numbers are, that have been equal


class LossTrials:
    """Findings about the losses of a run.

    Args:
        context: what steps run on.

    Attributes:
        reading: what the loss is made of, as far as it was seen.
        once: values that a step writes once per batch.
        around: whether layers may run in micro-batches where the loss is one of the whole batch.
        again: whether the step was seen to call the layers again.
        turns: why micro-batches cannot take turns, where the step calls the layers more than once; or "".
        exchanged: what they exchange when they do.
        began: whether the latest step was the first of a phase, as far as the step's code says.
        replicas: what trials have to do with the other replicas; ``None`` for one.
    """

    def __init__(self, context: StepContext) -> None:
        self._context, self._mesh, self._device = context, context.mesh, context.device
        self._module, self._layers, self._recording = context.module, context.layers, context.recording
        self._stages, self._streams = context.stages, context.streams
        self._schedule = partial(context.schedule, forward_only=True)
        self._steps, self._next, self._flat = 0, 1, -1
        self._looks: set[Any] = set()
        self._held: tuple[Any, Sequence[Any]] | None = None
        self._keys: set[str] = set()
        self._new_keys, self._fresh, self._differ, self._asked = False, False, False, 0
        self._rounds = context.mesh.layout.tensor * context.mesh.layout.context > 1  # numbers, each rank otherwise
        self._extremes, self._beyond, self._untold = Extremes(), cast("int | None", None), Untold()
        several = context.mesh.layout.data > 1
        self._meetings = Meetings(context.mesh.group("data_parallel") if several else None)
        self._met: frozenset[int] = frozenset()  # in the latest batch
        self._weigh = context.options.loss_weight
        stays = context.options.whole_batch_loss is True
        self.reading = Reading({} if self._weigh is None else {self._weigh: 0.0}, stays=stays)
        self.once, self._written, self._unsure = OncePerBatch(), Written(), False
        self.around, self._apart, self.again, self._in_layers = False, "", False, False
        self.replicas = OverReplicas(context.mesh, self._device, self._module, self._layers) if several else None
        self._phases: Phases | None = None
        self._looks_other, self.began, self._of_held = False, False, False
        self.turns, self.exchanged = "", Exchanged()

    def read(self, call: Callable[[Any], Any], batch: Any, parts: Sequence[Any]) -> Reading:
        """Composition of the loss of ``batch``; runs a trial where one is due. Collective over the replicas.

        Args:
            call: the user's step, taking a (micro-)batch.
            batch: equal on all stages of a replica.
            parts: its micro-batches; one where it runs uncut.
        """
        self._steps += 1
        held, self._held = self._held, None
        self._phases = self._phases or Phases(self._module)
        self._phases.look()
        self.began = self._phases.changed or self._looks_other
        if self.replicas is not None:
            self.replicas.unseen, self.replicas.counted = False, None
        known = self.reading.tried and self.reading.whole and not self._weighs_whole(parts)
        if not known or self._steps == 1 or self.around or self.reading.opaque or self.reading.undecided:
            why = self._due(batch, parts)
            if why:
                self._of_held = held is not None
                self._try_if_possible(call, *(held or (batch, parts)), why)
            new = held is None and why not in ("", "counts")
            if new and self.reading.settled and self._counts_otherwise(batch, parts):  # than pieces that counted alike
                self._try_if_possible(call, batch, parts, "counts")
        else:  # batches are whole, whatever begins
            self._phases.note()
            self._looks_other = self.began = False
        if self.replicas is not None and self.replicas.unseen and look_of(batch) not in self._looks:
            self._held = batch, parts
        elif self.replicas is not None:
            self.replicas.unseen = False
        return self.reading

    def _try_if_possible(self, call: Callable[[Any], Any], batch: Any, parts: Sequence[Any], why: str) -> None:
        found: list[TriedParts | None] = []
        cut = len(parts) > 1 and not (why == "counts" and self._weighs_whole(parts))
        rather = why == "time" and self._steps > 1  # may show what pairs of unlike samples do
        first = self._steps == 1 or bool(self._met)
        if cut:
            found = [TriedParts(batch, list(parts), batch_size_of(batch))]
            found += all_of(batch, parts, self.replicas, self._met, later=rather) if rather or first else ()
        elif self.replicas is not None:
            uncut = self.replicas.pieces_of(batch, apart=why == "counts", rather=rather, say=self._weigh is None)
            found = [uncut, *(sharing(batch, uncut.parts, self.replicas, self._met) if uncut and first else ())]
        due = self._steps >= self._next
        self._looks.add(look_of(batch))
        if self._phases is not None:
            self._phases.note()
        for pieces in filter(None, found):
            steps, spread = self._steps, self._context.gradients.windows
            self._try(call, pieces, why, cut=cut)
            if steps == self._steps == 1 and not self.reading.settled:
                with without_zero_weights(self._module, () if spread is None else spread.windows):
                    self._try(call, pieces, why, cut=cut)
            if self.again:
                break
        if due and not any(found):
            self._next = next_try(self._steps)
        self._new_keys, self._differ = False, False

    def _weighs_whole(self, parts: Sequence[Any]) -> bool:
        """Whether batches run whole, and what they count beside those of other replicas is known by trials."""
        uncut = len(parts) == 1 or self.reading.whole
        return uncut and self.replicas is not None and self.reading.tells_replicas

    @property
    def cuts_none(self) -> bool:
        """Whether what was tried in micro-batches runs whole, in the layers too, and is weighed over the replicas."""
        return self.reading.tried and self.reading.whole and not self.around and self._weighs_whole(())

    @property
    def looks_new(self) -> bool:
        """Whether the batch of the latest step looks like none before, which replicas do not see alike."""
        return self.replicas is not None and self.replicas.unseen

    @property
    def tells(self) -> bool:
        """Whether the latest step was unlike those that were tried, which other ranks are to hear of."""
        return self.looks_new or (self._phases is not None and self._phases.switched)

    def keep_whole(self) -> None:
        """Say that the loss is one of the whole batch, in layers and after them."""
        self.reading, self.around, self._in_layers = replace(self.reading, stays=True), False, True

    def note_logged(self, outcome: Outcome) -> None:
        """Say what a step has logged, on every rank alike."""
        names, differ = [key.name for key in outcome.logs.keys], outcome.differ
        self._looks_other |= outcome.unseen
        self._differ = differ or (self._rounds and self._steps in _ROUNDED)
        told = self.reading.logs.keys() - self.reading.slight
        self._differ &= self._asked < _UNSETTLED and not told.issuperset(names)
        self._asked += self._differ
        if not self._keys.issuperset(names):
            self._new_keys = not self._fresh
            self._keys.update(names)
        self._fresh = False

    def _due(self, batch: Any, parts: Sequence[Any]) -> str:
        """Why the step has to be tried on this batch; "" if it need not be."""
        reading = self.reading
        known = reading.tried and (reading.whole or not any(reading.open()))
        self._beyond, self._met = None if known else self._extremes.grow(batch), self._meetings.grow(parts)
        if look_of(batch) not in self._looks:
            if self.replicas is None or self._steps == 1:
                return "look"
            self.replicas.unseen = True  # is tried with the others, in the next step
        other, self._looks_other = self._looks_other, False  # in the step before, on some rank
        if self._phases is not None and self._phases.changed:
            return "phase"
        if other or self._met:
            return "meet" if self._met else "other"
        if self._steps >= self._next:
            return "time"
        uncut = len(parts) == 1 or reading.whole
        if reading.whole and not (reading.opaque or reading.undecided or self._weighs_whole(parts)):
            return ""
        unsettled = not reading.settled or reading.undecided or (self._unsure and not uncut)
        if self._new_keys or self._differ or (unsettled and self._steps <= _UNSETTLED):
            return "keys"
        return "counts" if self._counts_otherwise(batch, parts) else ""

    def _counts_otherwise(self, batch: Any, parts: Sequence[Any]) -> bool:
        """Whether ways of counting that were not told apart would weigh this batch otherwise than the one in use."""
        counts = list(self.reading.open())
        if not counts or (self.reading.whole and not self._weighs_whole(parts)):
            return False
        if (len(parts) == 1 or self.reading.whole) and self.replicas is not None:
            way = self.reading.way
            used: Callable[[Any], float] = way if isinstance(way, Counted) else batch_size_of
            return self._untold.may_tell(self.replicas.unlike_weights(counts, used, batch), self._steps)
        unlike = unlike_weights(counts, self.reading.way, batch, parts)
        other = self._untold.may_tell(unlike, self._steps) or self._beyond is not None
        differs = torch.tensor(int(other), device=self._device)
        if self._mesh.layout.data > 1:
            differs = raw_all_reduce(differs, self._mesh.group("data_parallel"), maximum=True)
        return bool(differs)

    def _try(self, call: Callable[[Any], Any], of: TriedParts, why: str, *, cut: bool) -> None:
        batch, parts = of.whole, of.parts
        joins = joins_of(of, self._beyond if cut else None, self._mesh.group("data_parallel"))
        due, self._fresh = self._steps >= self._next, True
        call = self._context.gradients.on_parts(call)
        call = self._context.experts.ending(call) if self._stages.repeats is None else call
        sees = None if self.replicas is None else SeesGroup(self.replicas.group)
        traces = Traces(self._module, beside=True)
        watched, passes = self._streams.of_batch, self._context.passes
        middle = None if passes is None else Middle(self._module, traces, passes.follower, sees)
        kept = NOTHING_KEPT if self.replicas is None else self.replicas.kept_of(joins, of)
        draws = SameDraws(joins.joins, self._streams.is_foreign, watched.others)
        tried = Tried(call, self._recording, traces, joins, self._stages, 2, middle or sees, draws, kept)
        step = PipelineStep(self._schedule(len(joins.pieces)), tried, joins.pieces, TRIAL)
        checked = max(joins.pieces, key=batch_size_of), len(joins.pieces)
        streams, windows = self._streams.trial(rows=joins.rows()), self._context.gradients.windows
        spread = nullcontext() if windows is None else windows.trial()
        with streams, spread, self._context.tries(), self._stages.running(*checked, training=False) as executor:
            executor.run(step) if passes is None else passes.try_on(step, self._streams)
        kinds, writes, unsure, _ = verdict = tried.written(self._layers, cut=cut)
        disproved = self._written.note(verdict) if cut else ""
        own, by_sample, gathers = list[Name](), False, sees is not None and sees.gathers
        if self.replicas is not None and not of.at_once:  # which are tried for the loss
            own, by_sample = self.replicas.own_values(tried, without_anew(kinds), traces, gathers=gathers, cut=cut)
        outcome = self._stages.outcome(lambda: self._found(step, tried, joins, gathers=gathers), TRIAL)
        self._stages.settle()
        before, found = self.reading, outcome.output
        if isinstance(found, StartOver):
            self.again, self._steps = True, self._steps - 1
            return
        alone = middle is None and self._may_run_around(tried, writes)
        turns = "" if middle is None else middle.refuses(list(kinds), draws=tried.draws.any, gathers=gathers)
        mine = (own, by_sample), writes, alone, unsure, self._of_held, len(joins.joins), tried.drawn(watched, cut=cut)
        keeps = {} if self.replicas is None else self.replicas.kept_kinds(without_anew(kinds))
        ways = turns, keeps, self._written.undecided, disproved, *tried.bends
        told = objects.gather(ToldOfTrial(*mine, *ways), self._mesh.group("world"))
        every, masks = zip(*(one.of_batch for one in told), strict=True), [one.masks for one in told]
        exact = not any(one.draws.narrow for one in told)
        found.settle(*(next(filter(None, each), None) for each in every), masks=masks, exact=exact, weigh=self._weigh)
        why = "look" if why == "other" and any(one.of_held for one in told) else why
        self.reading = before.after(found)
        self._flat = self._flat if found.tells else self._steps  # the latest step whose losses told nothing
        said.warn_of_shared_draws(self._streams.learn([one.draws for one in told] if cut else []))
        self._next = self._next_time(told) if due or any(one.own[1] for one in told) else self._next
        self._take(tried, kinds, middle, told)
        could, self.around = self.around, self.around and not cut and why == "counts"
        if self.replicas is not None:
            self.replicas.say(before, found, self.reading, [one.own for one in told], cut=cut)
            if not cut and (why == "other" or self._flat == self._steps - 1):
                said.warn_of_another_way(before, self.reading, self._steps - 1)
        if cut and self.reading.whole and all(one.alone for one in told):
            places, (both, some) = joins.pieces, [*joins.joins.items()][-1]  # most at once
            tells = (parts, batch) if found.opaque or of.at_once else ([places[at] for at in some], places[both])
            self._apart = self._try_around(call, *tells)
            self.around = not self._apart
        if cut and not (could and self.around):
            self._say(before, found, len(parts), why, disproved=any(one.disproved for one in told))
        if cut and self._differ and not self.reading.whole:
            said.warn_of_logged(before, self.reading, self._steps - 1)
        if not cut:
            self._stages.release()

    def _may_run_around(self, tried: Tried, writes: str) -> bool:
        """Whether layers may run in micro-batches, as far as this stage knows, and the code around them once."""
        inside = self._in_layers or writes in Parts(self._layers) or self._stages.leaves_behind(TRIAL)
        return self._stages.may_run_around and not (inside or tried.traces.weights.found or tried.draws_compiled)

    def _next_time(self, told: Sequence[ToldOfTrial]) -> int:
        """The step that is tried anyhow, after one that was."""
        if any(by_sample for _, by_sample in (one.own for one in told)) and self._steps <= _UNSETTLED:
            return self._steps + 1  # with what this one will have kept of its samples
        few = min(one.joins for one in told) == 1  # replicas may have unlike numbers of micro-batches
        return next_try(self._steps, _EARLY if few else 0)

    def _take(
        self, tried: Tried, kinds: Mapping[Name, Kinds], middle: Middle | None, told: Sequence[ToldOfTrial]
    ) -> None:
        """Take note of what a step writes, at its end and in the middle of it."""
        self._unsure = any(one.unsure for one in told)
        bind(self.reading, self._module, self._mesh)
        usual = self.reading.way if self.reading.fits and self.reading.way else "sizes"
        for name, place in zip(kinds, tried.traces.tables(list(kinds)), strict=True):
            self._written.learn(name, kinds[name], place, tried.turn(name, self._layers, self._stages.runs_once), usual)
        self.once = OncePerBatch(self._module, [*self._written.slots.values()], tried.traces.plain(self._layers))
        tried.tell(usual, "training")
        self.turns = next((one.turns for one in told if one.turns), "")
        if self.replicas is not None:
            self.replicas.learn_kept([one.kept for one in told], usual)
        if middle is not None:
            self.exchanged = self.exchanged.joined(middle)

    def _try_around(self, call: Callable[[Any], Any], parts: Sequence[Any], both: Any) -> str:
        """Why the layers cannot run in micro-batches where the loss is one of the whole batch; "" if they can."""
        traces = Traces(self._module, beside=True)
        use_rows = lambda each: self._streams.use_rows(Deal().rows(list(map(batch_size_of, each))))  # noqa: E731
        given = call, self._recording, traces, parts, both, self._schedule, use_rows
        tried = AroundTrial(*given, lambda: self._stages.is_behind_layers)
        running = self._stages.running(both, len(parts), training=False)
        with self._streams.trial(), self._context.tries(), running as executor:
            tried.run(executor)

        def judged() -> Outcome:
            why = tried.verdict(self._device, lambda loss: narrowest(loss, self._device))
            return Outcome(StepLogs([], torch.zeros(0, 3, dtype=torch.float64, device=self._device)), output=[why])

        judgement = self._stages.outcome(judged, TRIAL).output
        self._stages.settle()
        self.again = isinstance(judgement, StartOver)
        why = "the step calls them more than once" if isinstance(judgement, StartOver) else judgement[0]
        # What is of the whole batch, such as its size, does not fit the runs on micro-batches.
        kept = traces.lasting(tried.before).difference(traces.buffers, self._written.slots)
        if state := min(map(spelled, kept), default=""):
            tried.failed = tried.failed or f"the code before them writes `{state}`, and goes on from it"
        whole, around = tried.written()
        around.update(name for name, slot in self._written.slots.items() if slot[2] == "same")  # which is set again
        sent = [{sendable(name, self._module) for name in names} for names in (whole, around)]
        told = objects.gather((tried.failed or why, *sent), self._mesh.group("world"))
        lost = set().union(*(whole for _, whole, _ in told)).difference(*(around for *_, around in told))
        between = [spelled(name) for name in lost if name[0] not in Parts(self._layers)]
        if between:
            return f"the code between them writes `{min(between)}`"
        return next((why for why, *_ in told if why), "")

    def _found(self, step: PipelineStep, tried: Tried, joins: Joins, *, gathers: bool) -> Outcome:
        """The finding of all replicas, on the stage that computes the loss."""
        outputs = [step.outputs[index] for index in range(len(step.micro_batches))]
        runs = [
            TrialRun(float(loss.detach()), narrowest(loss, self._device), logs, torch.finfo(loss.dtype).eps)
            for loss, logs in zip(map(loss_of, outputs), tried.logs(), strict=True)
        ]
        classes = class_weights_of(self._module, tried.met.tables if self.replicas is None else None)
        found = replace(joins.finding(runs, tried.met.constants, classes), failed=tried.failed, gathers=gathers)
        for axis in ("data_parallel", "context_parallel", "tensor_parallel"):
            first, *others = objects.gather(found, self._mesh.group(axis))
            found = first.joined(others)
        return Outcome(StepLogs([], torch.zeros(0, 3, dtype=torch.float64, device=self._device)), output=found)

    def say_statistics(self) -> None:
        """Say once which layers compute over what they see of a batch; for runs that are not tried."""
        layers, self._layers = self._layers, ()
        said.say_statistics(self._module, layers)

    def _say(self, before: Reading, found: Finding, parts: int, why: str, *, disproved: bool) -> None:
        if (before.opaque and self.reading.opaque) or (before.undecided and self.reading.undecided):
            return  # said before
        if self.reading.whole and self.around:
            said.say_around(found, self.reading, parts)
        else:
            said.say_reading(before, found, self.reading, parts, self._mesh.layout.pipeline, self._apart)
        new = (found.writes and not disproved) or found.undecided or before.undecided or found.opaque
        if self.reading.whole and before.tried and not before.whole and not new and why in _LATE:
            said.warn_of_earlier_steps(self._steps - 1)
