"""Numbers that steps of evaluation log, made those of all replicas' samples.

One process has the samples of all replicas in one batch. What a replica logs for its own may be a mean over its samples
or targets, a sum, an extreme, or a function of such, whatever ``reduce_fx`` makes of the batches of an epoch::

    replica 0   30 tokens   mean 2.0 ┐  mean of means         1.50   as by ``sync_dist=True``
    replica 1   70 tokens   mean 1.0 ┘  mean over all tokens  1.30   one process

Replicas may have unlike numbers of batches where nothing is logged, so that they meet only after a step whose code
logs, or that has logged something. There they see whether there are numbers of which it is not known how they combine.
If so, the step is tried on parts of the batch, and what it has logged is put together anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.mesh.batches import batch_size_of
from lightning_megatron.mesh.draws.same_draws import SameDraws
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep
from lightning_megatron.pipeline.stage.final_state import tried
from lightning_megatron.strategy.carried.behind_conditions import BehindConditions
from lightning_megatron.strategy.generation.repeats import StartOver
from lightning_megatron.strategy.lightning.hooks import logs_itself
from lightning_megatron.strategy.lightning.trainer_access import present
from lightning_megatron.strategy.logs.combining import Mean, Narrowed
from lightning_megatron.strategy.logs.step_logs import StepLogs
from lightning_megatron.strategy.loss.counted import candidates
from lightning_megatron.strategy.loss.over_replicas import OverReplicas, SeesGroup
from lightning_megatron.strategy.loss.said import with_lines
from lightning_megatron.strategy.loss.tables import Name, sendable, spelled
from lightning_megatron.strategy.loss.traces import Traces
from lightning_megatron.strategy.loss.trials.joined_pieces import Joins, TriedParts
from lightning_megatron.strategy.loss.trials.pieces_tried import Tried
from lightning_megatron.strategy.loss.trials.samples_apart import joins_of
from lightning_megatron.strategy.loss.weighing import Finding, Reading, TrialRun
from lightning_megatron.strategy.loss.written import Kinds, common_kinds
from lightning_megatron.strategy.step.replica_mean import ReplicaMean
from lightning_megatron.strategy.step.step import Outcome
from lightning_megatron.strategy.step.step_context import StepContext

_AGAIN = 8  # factor between the batches in which it is tried anyhow
_UNSETTLED = 16  # batches in which what tells nothing is tried again
_DIFFERS = 1e-9  # relative, of numbers that replicas log


@dataclass
class _Known:
    """Facts about one kind of step, on the ranks that compute the loss.

    Attributes:
        reading: how what it logs combines.
        count: batches that have logged something.
        next: when it is tried anyhow.
        tried: how often it was.
        told: ways of counting by which some batch here has entries that count nothing.
        keys: that were logged.
        untold: keys that were logged as means although nothing was known of them.
        untried: whether batches have no parts that could be tried.
        said: keys that were warned about.
        written: how what it writes comes of what its parts write; "" for what does not.
        behind: knows which of it the step writes behind a condition on its batch.
        unsure: names of these of which no trial has seen how parts come together that do not all meet it.
    """

    reading: Reading = field(default_factory=Reading)
    count: int = 0
    next: int = 1
    tried: int = 0
    told: set[Any] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    untold: set[str] = field(default_factory=set)
    untried: bool = False
    said: set[str] = field(default_factory=set)
    written: Narrowed = field(default_factory=Narrowed)
    behind: BehindConditions | None = None
    unsure: set[Name] = field(default_factory=set)


class LoggedInEvaluation:
    """Knows how numbers that steps of evaluation log combine over replicas.

    Args:
        context: what steps run on.
        replicas: gives parts of their batches; ``None`` for one.
        undone: takes back what a run writes, on the stages that hear of it from the one that computes the loss.

    Attributes:
        start: what was written before the first batch of a loop, where that batch is tried for what its step writes,
            whatever it logs; else ``None``.
    """

    def __init__(self, context: StepContext, replicas: OverReplicas | None, undone: Callable[..., Any]) -> None:
        options = context.options
        self._context, self._undone = context, undone
        self._replicas = replicas if options.whole_batch_loss is not False else None
        self._mean = ReplicaMean(context.mesh, context.device)
        self._known: dict[str, _Known] = {}
        self._logs: dict[str, bool] = {}
        self.start: Traces | None = None

    def _may_log(self, name: str) -> bool:
        """Whether the code of a step logs, so that replicas meet after it although none of theirs has."""
        if name not in self._logs:
            self._logs[name] = logs_itself(self._context.module, name)
        return self._logs[name]

    @property
    def tries(self) -> bool:
        """Whether steps are tried at all."""
        return self._replicas is not None

    def written(self, name: str) -> Mapping[Name, Any]:
        """By name of a value that a step writes, how it comes of what the replicas write; "" where that is unknown.

        Args:
            name: of the user's step.
        """
        return self._known[name].written.chosen if name in self._known else {}

    def unsure(self, name: str) -> Collection[Name]:
        """Names of values that a step writes behind a condition on its batch, of which no trial has seen how parts come
        together that do not all meet it.

        Args:
            name: of the user's step.
        """
        return self._known[name].unsure if name in self._known else ()

    def ways(self, name: str) -> Mapping[str, Any]:
        """By key, how logged numbers combine, as far as is known.

        Args:
            name: of the user's step.
        """
        known = self._known.get(name)
        return {} if known is None else known.reading.within

    def over_replicas(self, outcome: Outcome, batch: Any, name: str, numbers: set[str]) -> None:
        """Put the logs of all replicas into an outcome, where the loss is computed; and whether to try the step after
        it (:attr:`.Outcome.differ`). Collective over the replicas if something was logged.

        Args:
            outcome: this replica's.
            batch: of this replica.
            name: of the user's step.
            numbers: keys that were logged as numbers, and not by metrics.
        """
        known = self._known.setdefault(name, _Known())
        tries = self._replicas is not None and not known.untried
        if tries and numbers:
            due = known.count + 1 >= known.next or not known.keys.issuperset(numbers)
            outcome.differ = self._tells(known, batch) or due
        self._mean.start(outcome, meets=self._may_log(name))
        self._mean.finish(outcome)
        numbers = numbers | self._mean.numbers
        if not (tries and numbers):
            outcome.differ = self.start is not None
            return
        known.count += 1
        known.keys |= numbers
        unlike = {key.name for key, off in zip(outcome.logs.keys, self._mean.unlike(_DIFFERS), strict=True) if off}
        known.untold = {key for key in unlike & numbers if key not in known.reading.logs}
        open_ = (bool(known.untold) or self._mean.partly) and known.tried < _UNSETTLED
        outcome.differ |= self.start is not None or open_
        if known.count >= known.next:
            known.next = known.count * _AGAIN

    def corrected(self, outcome: Outcome, call: Callable[[Any], Any], batch: Any, name: str) -> Outcome:
        """The outcome of a step that is to be tried. Collective over the world.

        Args:
            outcome: of the step.
            call: the user's step, taking a batch.
            batch: of this replica.
            name: of the user's step.
        """
        if self._replicas is None:
            return outcome
        pieces = self._replicas.pieces_of(batch, say=False)
        known = self._known.setdefault(name, _Known())
        if pieces is None:
            known.untried = True
            if known.untold:
                _say_untried(known.untold, self._replicas.group.size(), name)
        else:
            with nullcontext() if self.start is None else self.start.again():  # a set has grown by this batch already
                tried = self._try(outcome, call, batch, pieces, name)
            outcome.logs = tried.logs
            written, unsure = tried.output or ({}, set())
            known.unsure = known.unsure.difference(written) | unsure
            for value, ways in written.items():
                known.written.learn(value, ways)
        outcome.differ = False
        return outcome

    def _try(self, outcome: Outcome, call: Callable[[Any], Any], batch: Any, pieces: TriedParts, name: str) -> Outcome:
        context, stages = self._context, self._context.stages
        group = context.mesh.group("data_parallel")
        joins, traces = joins_of(pieces, None, group), Traces(context.module, beside=True)
        foreign = context.streams.is_foreign
        sees = SeesGroup(group)
        replicas = present(self._replicas, "replicas")
        kept = replicas.kept_of(joins, pieces)
        call = context.gradients.on_parts(call)
        call = context.experts.ending(call) if stages.repeats is None else call
        draws = SameDraws(joins.joins, foreign)
        run = Tried(call, context.recording, traces, joins, stages, 2, sees, draws, kept)
        step = PipelineStep(context.schedule(len(joins.pieces), forward_only=True), run, joins.pieces, tried(name))
        checked, repeats = (max(joins.pieces, key=batch_size_of), len(joins.pieces)), stages.repeats
        passes = repeats.run if repeats is not None and repeats.includes(name) else None
        stages.begin_evaluation()
        with context.streams.trial(name, rows=joins.rows()), stages.running(*checked, training=False) as executor:
            executor.run(step) if passes is None else passes(step, self._undone)
        kinds, *_ = run.written(context.layers, cut=False)
        grown = {value for value, ways in kinds.items() if {"sum", "set"}.intersection(ways)}
        rows = replicas.learn_rows(run, traces.lasting(set(run.changes(0))) - grown)  # of layers on any stage
        uncut = any(objects.gather(bool(rows.difference(kept.names)), context.mesh.group("world")))
        joined = partial(self._joined, outcome, run, joins, batch, name, sees, kinds)
        if uncut and (known := self._known[name]).tried < _UNSETTLED:
            known.tried, known.next = known.tried + 1, known.count + 1  # with what this batch leaves of its samples
            joined = partial(Outcome, outcome.logs)
        found = stages.outcome(joined, tried(name))
        stages.settle()
        if isinstance(found.output, StartOver) and repeats is not None:
            repeats.note(name)
            return self._try(outcome, call, batch, pieces, name)
        return found

    def _joined(
        self,
        outcome: Outcome,
        run: Tried,
        joins: Joins,
        batch: Any,
        name: str,
        sees: SeesGroup,
        kinds: Mapping[Name, Kinds],
    ) -> Outcome:
        """The step's logs, put together as the trial tells, how what it writes comes together, and names of what was
        not seen to in all ways (as output); on the ranks that compute the loss.
        """
        known, group = self._known[name], self._context.mesh.group("data_parallel")
        found: Finding | None = None if run.failed else self._found(run, joins)
        for axis in ("data_parallel", "context_parallel", "tensor_parallel"):
            told = [each for each in objects.gather(found, self._context.mesh.group(axis)) if each is not None]
            found = told[0].joined(told[1:]) if told else None
        told = objects.gather((run.draws.narrow, run.metric_of_batches() if not run.failed else None), group)
        narrow, metric = any(narrow for narrow, _ in told), next((each for _, each in told if each), None)
        module, layers = self._context.module, Parts(self._context.layers)
        told_kinds = {sendable(value, module): ways for value, ways in kinds.items() if value[0] not in layers}
        written = common_kinds([each or {} for each in objects.gather(told_kinds or None, group)])
        unsure = self._unsure(known, name, run, kinds)
        known.tried += 1
        if any(objects.gather(sees.gathers, group)):  # it is taken at its word
            known.untried = True
            return Outcome(outcome.logs)
        if found is None:
            known.untried = True
            _say_untried(known.untold, group.size(), name, run.failed)
            return Outcome(outcome.logs)
        found.settle("", exact=not narrow)
        known.reading = known.reading.after(found)
        ways = known.reading.within
        counts = [way for way in ways.values() if isinstance(way, Mean) and callable(way.weigh)]
        mine = {"weights": float(batch_size_of(batch)), **{way.weigh: float(way.weigh(batch)) for way in counts}}
        mine["sizes"] = mine["weights"]
        every, rows = objects.gather(mine, group), outcome.logs.rows.clone()
        for index, key in enumerate(outcome.logs.keys):
            how = ways.get(key.name)
            if how is not None and how != "mean" and key.metric is None:
                weights = [each[how.weigh] if isinstance(how, Mean) else 1.0 for each in every]
                rows[index, 0] = self._mean.combined(index, how, rows.new_tensor(weights))
        self._say(known, found, ways, name, group.size())
        _say_metric(known.said, metric, name, group.size())
        return Outcome(StepLogs(outcome.logs.keys, rows, outcome.logs.own), output=(written, unsure))

    def _unsure(self, known: _Known, name: str, run: Tried, kinds: Mapping[Name, Kinds]) -> set[Name]:
        """Names of values that were not seen to be written by several parts of a batch, and by some of them."""
        module, group = self._context.module, self._context.mesh.group("data_parallel")
        if known.behind is None:
            known.behind = BehindConditions(module, group, lambda: functions_of_step(module, name), loops=False)
        mine = known.behind.unsure(run, kinds, kinds)
        return {value for each in objects.gather(mine or None, group) for value in each or ()}

    def _found(self, run: Tried, joins: Joins) -> Finding:
        """Findings in the logs of the pieces."""
        loss = torch.float64 if not run.draws.narrow else torch.float32
        runs = [TrialRun(0.0, loss, logs) for logs in run.logs()]
        return joins.finding(runs)

    def _tells(self, known: _Known, batch: Any) -> bool:
        """Whether entries of a batch count nothing, in a way in which none before had any."""
        try:
            new = {way for way in candidates(batch) if way not in known.told and way.tells(batch)}
        except ValueError:  # a batch without tensors
            return False
        known.told |= new
        return bool(new)

    @staticmethod
    def _say(known: _Known, found: Finding, ways: Mapping[str, Any], name: str, replicas: int) -> None:
        new = [key for key, how in ways.items() if how is None and key not in known.said]
        known.said.update(new)
        if new:
            rank_zero_warn(
                f"what `self.log` is given as {with_lines(new, found)} for a batch of `{name}` is not made of what "
                f"its parts give; the mean over the {replicas} replicas is logged. Log a torchmetrics object."
            )


def _say_untried(keys: set[str], replicas: int, name: str, failed: str = "") -> None:
    """Say that it is not known how numbers combine."""
    if not keys:
        return
    why = f"does not run on parts of a batch ({failed})" if failed else "could not be tried on parts of a batch"
    rank_zero_info(
        f"`{name}` {why}: what it logs as {', '.join(f'`{key}`' for key in sorted(keys))} is the mean over the "
        f"{replicas} replicas, as with `sync_dist=True`."
    )


def _say_metric(said: set[str], metric: Name | None, name: str, replicas: int) -> None:
    """Say that a torchmetrics object is told numbers of batches, of which each replica has its own."""
    if metric is None or spelled(metric) in said:
        return
    said.add(spelled(metric))
    rank_zero_warn(
        f"`{name}` tells the torchmetrics object `{metric[0]}` a number of the batch (its `{metric[1]}` is not made of "
        f"what parts of a batch bring), such as its loss: each of the {replicas} replicas tells it that of its own "
        "samples, and what it computes is another number than in one process. Tell it a value of each sample "
        "(`reduction='none'`), or log the number itself, with `reduce_fx='max'`, `'min'` or `'sum'`."
    )
