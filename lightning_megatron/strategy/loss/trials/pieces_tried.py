"""The user's step on the pieces of a trial of the loss, and what it does there."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torchmetrics import SumMetric

from lightning_megatron.data_parallel.windows.agreement import UnlikeReplicasError
from lightning_megatron.mesh.batches import batch_size_of, map_tensors
from lightning_megatron.mesh.draws.batch_draws import BatchDraws
from lightning_megatron.mesh.draws.same_draws import Drawn, SameDraws
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.mesh.watch.echoes import RemoteFailure, is_echo
from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step
from lightning_megatron.pipeline.elsewhere.undo import LISTS
from lightning_megatron.pipeline.forwards.compiled import has_compiled
from lightning_megatron.strategy.carried.rows_of_samples import (
    NOTHING_KEPT,
    Dims,
    RowsOfPieces,
    are_own_rows,
    sample_dims,
)
from lightning_megatron.strategy.carried.step_stores import defaults_of, is_stored, stored_behind_counts
from lightning_megatron.strategy.hooks.metric_states import MetricStates
from lightning_megatron.strategy.logs.batch_copies import whole_copy
from lightning_megatron.strategy.logs.combining import Logged
from lightning_megatron.strategy.logs.step_logs import LogRecorder
from lightning_megatron.strategy.loss.counted import candidates
from lightning_megatron.strategy.loss.tables import Name, spelled
from lightning_megatron.strategy.loss.traces import Changes, Traces
from lightning_megatron.strategy.loss.trials.bends import Bend, Bends
from lightning_megatron.strategy.loss.trials.masks import Masks
from lightning_megatron.strategy.loss.written import Join, Verdict, Weights, judge
from lightning_megatron.strategy.step.step_context import Over, Recording, Stages

_AGAIN = 8  # factor between the steps in which they are tried anyhow
_ORDER = "an order of the samples, behind a condition that the trial did not meet:"
_COMPILED = "for a batch, in a module that is compiled (a mask of weights, one number for all samples)"


class TriedPieces(Protocol):
    """The pieces that a trial runs; see :class:`Joins`."""

    @property
    def pieces(self) -> Sequence[Any]:
        """In the order in which they run."""

    @property
    def joins(self) -> Mapping[int, tuple[int, ...]]:
        """Place of several at once among the pieces -> places of the one, the other, ..."""


class ToldOfTrial(NamedTuple):
    """The ranks' messages to each other about a trial.

    Attributes:
        own: what :meth:`.OverReplicas.own_values` gives.
        writes: a value that only the whole batch can write, or "".
        alone: whether layers may run in micro-batches, and the code around them on the whole batch.
        unsure: whether how a value comes together does not show yet.
        of_held: whether the batch has run before, whole, so that no step was other than one process's.
        joins: number of joined pieces.
        draws: what is drawn, and in which types it computes.
        turns: why micro-batches cannot take turns, where a step calls the layers more than once; or "".
        kept: what :meth:`.OverReplicas.kept_kinds` gives.
        undecided: see :class:`.Finding`.
        disproved: a value that comes together in another way than in earlier trials, or "".
        bend: see :class:`.Finding`; of this stage.
        masks: see :class:`.Finding`; of this stage.
    """

    own: tuple[list[Name], bool]
    writes: str
    alone: bool
    unsure: bool
    of_held: bool
    joins: int
    draws: Drawn
    turns: str
    kept: Mapping[Name, Any]
    undecided: str
    disproved: str
    bend: Bend | None
    masks: Masks

    @property
    def of_batch(self) -> tuple[str, str, str, Bend | None]:
        """Reasons why a batch has to stay whole, as :meth:`.Finding.settle` takes them."""
        return self.disproved or self.writes, self.draws.apart, self.undecided, self.bend


class Tried:
    """The user's step on the pieces of a trial; leaves nothing behind.

    Args:
        call: the user's step, taking a (micro-)batch.
        recording: of the logs.
        traces: of the module, to be put back.
        joins: the pieces.
        stages: of this rank's pipeline.
        counts_as: how many micro-batches the logs of each piece are told that there are.
        around: each run.
        draws: of the pieces.
        kept: of the samples of earlier steps, cut for each piece.

    Attributes:
        kept: see above.
        recorders: by piece, of what it logs.
        met: bends of its loss, and what it compares and weighs by.
        failed: why it does not run on one of them, as far as the code after the layers is concerned; or "".
    """

    def __init__(
        self,
        call: Callable[[Any], Any],
        recording: Recording,
        traces: Traces,
        joins: TriedPieces,
        stages: Stages,
        counts_as: int = 1,
        around: AbstractContextManager[Any] | None = None,
        draws: SameDraws | None = None,
        kept: RowsOfPieces = NOTHING_KEPT,
    ) -> None:
        self._around = nullcontext() if around is None else around
        self._counts_as, self.kept = counts_as, kept
        self._call, self._recording, self.traces, self._pieces = call, recording, traces, joins
        self.draws, self._stages, self.failed = draws or SameDraws(joins.joins), stages, ""
        self._changes: list[Changes] = [{} for _ in joins.pieces]
        self._metrics, self.met = MetricStates(traces.module), Bends(traces.module)
        self._runs, self._turns = [0 for _ in joins.pieces], dict[Name, int]()
        self.recorders: list[LogRecorder | None] = [None for _ in joins.pieces]

    def __call__(self, part: Any, index: int) -> Any:
        try:
            eager = torch.compiler.set_stance("force_eager")  # a layer first compiled here would stay uncompiled later
            weights = self.traces.noted()
            recording = self._recording.step(self._counts_as)
            with recording as recorder, self.kept.of(index), self.draws.run(index), self._around, weights, eager:
                self.recorders[index] = recorder
                with self.met.begin(index):
                    self.met.take_batch(given := whole_copy(part))
                    output = self._call(given)
                self.met.end(output)
                return map_tensors(output, torch.detach)
        except Exception as error:
            if (
                isinstance(error, RemoteFailure | UnlikeReplicasError)
                or is_echo(error)
                or not self._stages.is_behind_layers
            ):
                raise
            self.failed = self.failed or f"{type(error).__name__}: {error}"
            return torch.tensor(math.nan, dtype=torch.float64)
        finally:
            with torch._C.DisableTorchFunction():  # a step that is watched must not read what other stages have
                changes = self.traces.changes()
                self._metrics.note(index)
                self.traces.put_back()
            self._changes[index] |= changes
            for name in changes:
                self._turns[name] = min(self._runs[index], self._turns.get(name, self._runs[index]))
            self._runs[index] += 1

    def written(self, layers: Sequence[str], *, cut: bool = True) -> Verdict:
        """How what a batch writes comes of its parts; see :func:`judge`.

        Args:
            layers: names of the trunk's.
            cut: whether micro-batches update one metric, and not replicas each its own.
        """
        joins = self.joins()
        names = {name for found in self._changes for name in found}
        verdict = judge(joins, layers, self.traces.lasting(names), self.traces.read(names) if cut else (), cut=cut)
        writes = spelled(self.mixed_metric(cut=cut) or ("", "")) or verdict.whole
        whole = next((spelled(name) for name in sorted(self.traces.weights.found)), writes)
        return verdict._replace(whole=whole, alone=verdict.alone | self._unmet())

    def _unmet(self) -> set[Name]:
        """Values that the step goes on from, not written here, but where a batch has many samples of a kind."""
        stored = stored_behind_counts(functions_of_step(self.traces.module))
        values = (*self.traces.values(), *defaults_of(self.traces.module, stored).items()) if stored else ()
        names = {name for name, value in values if is_stored(name, value, stored)}
        return self.traces.lasting(names) & names.difference(*self._changes)

    def joins(self) -> list[Join]:
        """Writes of the parts, each alone and both at once."""
        return [
            Join([self._changes[at] for at in pair], self._changes[both], self._weights(both), self.traces.assigned)
            for both, pair in self._pieces.joins.items()
        ]

    def mixed_metric(self, *, cut: bool) -> Name | None:
        """A state of a metric that the parts of a batch do not leave as the whole does; ``None`` for none."""
        return self._metrics.mixed(self._pieces.joins, self._weights, cut=cut)

    def metric_of_batches(self) -> Name | None:
        """A state of a metric that is not that of one process where each replica tells it a number of its own batch;
        ``None`` for none. A mean of as many numbers from each replica is.
        """
        told = self._metrics.told(self._pieces.joins, self._weights).items()
        sums = ((name, metric.state_name) for name, (metric, _) in told if isinstance(metric, SumMetric))
        return next(sums, None) or self.mixed_metric(cut=False)

    def drawn(self, watched: BatchDraws | None = None, *, cut: bool = True) -> Drawn:
        """Message about the draws for other ranks; compiled code draws for a batch in each micro-batch.

        Args:
            watched: knows what else the step may draw, behind conditions.
            cut: whether there are any.
        """
        found = self.draws.told()
        if not cut:
            return found
        if self.draws_compiled:
            return found._replace(apart=found.apart or _COMPILED, of_batch=frozenset())
        line = "" if watched is None else watched.orders(found.places)
        return found._replace(apart=found.apart or (line and f"{_ORDER} {line}"))

    @property
    def bends(self) -> tuple[Bend | None, Masks]:
        """The place at which the loss bends at a number of the batch, ``None`` for none; and masks of integers, with
        what of the loss they may bend.
        """
        sizes = [batch_size_of(piece) for piece in self._pieces.pieces]
        found = [each for join in self._pieces.joins.items() for each in self.met.of_batch(*join, sizes)]
        bend = next((bend for bend, _ in found if not bend.of_masks), None)
        return bend, Masks(self.met.told_masks, tuple(each for each in found if each[0].of_masks))

    @property
    def draws_compiled(self) -> bool:
        """Whether compiled code may draw for a batch, in layers too."""
        return bool(self.draws.of_batch) and has_compiled(self.traces.module)

    def _weights(self, both: int) -> Weights:
        """Weights of the parts of a join, in the ways in which a mean of theirs may be weighed."""
        pieces = self._pieces.pieces
        parts = [pieces[index] for index in self._pieces.joins[both]]
        ways = candidates(pieces[both], *parts, constants=self.met.constants)
        counts = {way: [float(way(part)) for part in parts] for way in ways}
        sizes = [float(batch_size_of(part)) for part in parts]
        return {"sizes": sizes, **{way: each for way, each in counts.items() if all(each)}}

    def changes(self, piece: int) -> Changes:
        """Writes of the step in one of the pieces."""
        return self._changes[piece]

    def sample_dims(self, name: Name) -> Dims | None:
        """Dims in which a value that is written has a row for each sample, in a part as in the whole; or ``None``."""
        found = {sample_dims(parts, whole) for parts, whole in self._left(name)}
        return found.pop() if len(found) == 1 else None

    def mixed_rows(self) -> list[Name]:
        """Values of which each part had its own rows, and leaves others than the whole; none where some are drawn."""
        if self.draws.any or self.draws.apart:
            return []
        dims = {name: self.sample_dims(name) for name in self.kept.names}
        return [
            name
            for name, where in dims.items()
            if where is not None and not all(are_own_rows(parts, whole, where) for parts, whole in self._left(name))
        ]

    def _left(self, name: Name) -> Iterator[tuple[list[Any], Any]]:
        """Values that the parts of each join leave under a name, and the one that the whole of it leaves."""
        for both, pair in self._pieces.joins.items():
            *parts, whole = (self._changes[piece].get(name, (None, None))[1] for piece in (*pair, both))
            yield parts, whole

    def turn(self, name: Name, layers: Sequence[str], once: Collection[str]) -> int | None:
        """In which of the runs of a piece, one for each virtual stage of this rank, a value is written: in that of its
        layer, or of its part that runs once, or in each, by code around the layers and as lists grow (``None``).
        """
        grows = any(isinstance(value, LISTS) for each in self._changes for value in each.get(name, ()))
        return self._turns[name] if name[0] in Parts(layers if grows else (*layers, *once)) else None

    def tell(self, usual: Any = None, over: Over = "") -> None:
        """Tell the recording which metrics are told a number of the batch, in which its micro-batches weigh somehow,
        and which keys are logged with the same ``batch_size=``, however many samples there are.

        Args:
            usual: the way to weigh of the loss, which goes before the others.
            over: see :meth:`.Recording.step`.
        """
        self._recording.learn(self._metrics.told(self._pieces.joins, self._weights), usual, over)
        sizes = [recorder.sizes() if recorder is not None else {} for recorder in self.recorders]
        for both, pair in self._pieces.joins.items():
            for name, size in sizes[both].items():
                parts = [sizes[piece].get(name) for piece in pair]
                if size is not None and all(part == size for part in parts):
                    self._recording.constant.add(name)
                elif None not in parts:
                    self._recording.constant.discard(name)

    def logs(self) -> list[dict[str, Logged]]:
        """Logged numbers, run by run."""
        return [recorder.logged() if recorder is not None else {} for recorder in self.recorders]


def next_try(step: int, early: int = 0) -> int:
    """The step in which they are tried after another; in those before ``early``, soon."""
    return step * (2 if step < early else _AGAIN)
