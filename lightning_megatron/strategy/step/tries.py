"""Trying a step on parts of a batch before it is run, to learn what the loss of the batch is made of.

Some neighbouring micro-batches, and each two of them at once, go through the pipeline, forward only, with the same
random numbers for the same samples, and what the step writes and logs is put back and forgotten::

    trial      F0 F1 F01 F2 F12 ...    losses of each, and of two    ──▶ how to weigh; or keep the batch whole
    step       F0 B0 F1 B1 ...         as found

Two at once, and not all: a trial holds no more than a step would. Several times two: a loss divided by the number of
its positives looks like a mean where two micro-batches have as many. And four where a micro-batch is one sample.

It is done in the first step, and again where the answer may be another one: as long as equal losses tell nothing, when
the batch looks different, when something new is logged, when a batch has ignored targets for the first time, and now
and then (steps 8, 64, 512, ...; 2 and 4 too where a batch has but two micro-batches).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_megatron.mesh.batches import batch_size_of, map_tensors, samples_of, tensors_of
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.mesh.random_streams import SegmentStreams
from lightning_megatron.mesh.same_draws import SameDraws
from lightning_megatron.mesh.watch.echoes import RemoteFailure, is_echo
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep, loss_of
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.stage.final_state import TRIAL
from lightning_megatron.strategy.generation.repeats import StartOver
from lightning_megatron.strategy.logs.step_logs import LogRecorder, Recording, StepLogs
from lightning_megatron.strategy.loss.apart import AroundTrial
from lightning_megatron.strategy.loss.traces import Counters, Name, Traces, judge
from lightning_megatron.strategy.loss.weighing import Counted, Finding, Part, Reading, candidates, find
from lightning_megatron.strategy.step.among_stages import Stages
from lightning_megatron.strategy.step.step import Outcome

_AGAIN = 8  # factor between the steps at which it is tried anyhow
_PARTS = 5  # most micro-batches that are tried
_FEW = 4  # samples at once, of fewer of which some losses look like means
_UNSETTLED = 16  # steps in which equal losses are tried again


class LossTrials:
    """What is known of the losses of a run.

    Args:
        module: the user's module.
        layers: names of the trunk's layers.
        mesh: the grid.
        device: where tensors live.
        stages: of this rank's pipeline.
        streams: random streams per segment.
        recording: of the logs.
        schedule: gives the schedule of a forward of so many micro-batches.
        always_whole: whether the user has said that the loss is one of the whole batch.

    Attributes:
        reading: what the loss is made of, as far as it was seen.
        counters: values that a step writes once per batch.
        around: whether layers may run in micro-batches where the loss is one of the whole batch.
        again: whether the step was seen to call the layers again.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        layers: Sequence[str],
        mesh: ParallelMesh,
        device: torch.device,
        stages: Stages,
        streams: SegmentStreams,
        recording: Recording,
        schedule: Callable[[int], Schedule],
        *,
        always_whole: bool = False,
    ) -> None:
        self._module, self._layers, self._mesh, self._device = module, layers, mesh, device
        self._stages, self._streams, self._recording, self._schedule = stages, streams, recording, schedule
        self._steps, self._next = 0, 1
        self._looks: set[Any] = set()
        self._keys: set[str] = set()
        self._new_keys, self._fresh = False, False
        self.reading = Reading(stays=always_whole)
        self.counters = Counters()
        self.around, self._apart, self.again = False, "", False

    def read(self, call: Callable[[Any], Any], batch: Any, parts: Sequence[Any]) -> Reading:
        """What the loss of ``batch`` is made of; runs a trial where one is due. Collective over the replicas.

        Args:
            call: the user's step, taking a (micro-)batch.
            batch: equal on all stages of a replica.
            parts: its micro-batches, two or more.
        """
        self._steps += 1
        if not self.reading.whole or self._steps == 1 or self.around or self.reading.opaque:
            why = self._due(batch, parts)
            if why:
                self._try(call, batch, parts, why)
        return self.reading

    def keep_whole(self) -> None:
        """Say that the loss is one of the whole batch, in layers and behind them."""
        self.reading, self.around = replace(self.reading, stays=True), False

    def note_logged(self, names: Sequence[str]) -> None:
        """Say what a step has logged, on every stage alike."""
        if not self._keys.issuperset(names):
            self._new_keys = not self._fresh
            self._keys.update(names)
        self._fresh = False

    def _due(self, batch: Any, parts: Sequence[Any]) -> str:
        """Why the step has to be tried on this batch; "" if it need not be."""
        look = _look_of(batch)
        if look not in self._looks:
            self._looks.add(look)
            return "look"
        if self._steps >= self._next:
            return "time"
        if self.reading.whole and not self.reading.opaque:
            return ""
        if self._new_keys or (not self.reading.settled and self._steps <= _UNSETTLED):
            return "keys"
        counts = list(self.reading.open())
        if not counts:
            return ""
        differs = torch.tensor(int(_weighs_otherwise(counts, self.reading.way, batch, parts)), device=self._device)
        if self._mesh.layout.data > 1:
            differs = raw_all_reduce(differs, self._mesh.group("data_parallel"), maximum=True)
        return "counts" if int(differs) else ""

    def _try(self, call: Callable[[Any], Any], batch: Any, parts: Sequence[Any], why: str) -> None:
        joins = _Joins(batch, parts)
        if self._steps >= self._next:
            self._next = self._steps * (2 if len(joins.joins) == 1 and self._steps < _AGAIN else _AGAIN)
        self._new_keys, self._fresh = False, True
        tried = _Tried(call, self._recording, Traces(self._module), joins, self._stages)
        step = PipelineStep(self._schedule(len(joins.pieces)), tried, joins.pieces, TRIAL)
        checked = max(joins.pieces, key=batch_size_of), len(joins.pieces)
        with self._streams.trial(), self._stages.running(*checked, training=False) as executor:
            executor.run(step)
        names, writes = tried.written(self._layers)
        outcome = self._stages.outcome(lambda: self._found(step, tried, joins), TRIAL)
        self._stages.settle()
        before, found = self.reading, outcome.output
        if isinstance(found, StartOver):
            self.again = True
            return
        inside = writes in Parts(self._layers) or self._stages.leaves_behind(TRIAL)
        alone = self._stages.may_run_around and not inside
        told = objects.gather((writes, alone, tried.draws.narrow), self._mesh.group("world"))
        found.settle(next((writes for writes, *_ in told if writes), ""), exact=not any(narrow for *_, narrow in told))
        self.reading = before.after(found)
        self.counters = Counters(tried.traces.slots(names), [tried.turn(name, self._layers) for name in names])
        could, self.around = self.around, False
        if self.reading.whole and all(alone for _, alone, _ in told):
            tells = (parts, batch) if found.opaque else (joins.pieces[:2], joins.pieces[2])
            self._apart = self._try_around(call, *tells)
            self.around = not self._apart
        if not (could and self.around) and not (before.opaque and self.reading.opaque):
            self._say(before, found, len(parts), why)

    def _try_around(self, call: Callable[[Any], Any], parts: Sequence[Any], both: Any) -> str:
        """Why the layers cannot run in micro-batches where the loss is one of the whole batch; "" if they can."""
        tried = AroundTrial(call, self._recording, Traces(self._module), parts, both, self._schedule)
        with self._streams.trial(), self._stages.running(both, len(parts), training=False) as executor:
            tried.run(executor)

        def judged() -> Outcome:
            why = tried.verdict(self._device, lambda loss: _narrowest(loss, self._device))
            return Outcome(StepLogs([], torch.zeros(0, 3, dtype=torch.float64, device=self._device)), output=[why])

        why = self._stages.outcome(judged, TRIAL).output[0]
        self._stages.settle()
        return next(filter(None, objects.gather(tried.failed or why, self._mesh.group("world"))), "")

    def _found(self, step: PipelineStep, tried: _Tried, joins: _Joins) -> Outcome:
        """The finding of all replicas, on the stage that computes the loss."""
        outputs = [step.outputs[index] for index in range(len(step.micro_batches))]
        runs = [
            Part(float(loss_of(output).detach()), _narrowest(loss_of(output), self._device), logs)
            for output, logs in zip(outputs, tried.logs(self._device), strict=True)
        ]
        findings = []
        for both, pair in joins.joins.items():
            parts = [joins.pieces[index] for index in pair]
            counts = {way: [way(part) for part in parts] for way in candidates(joins.pieces[both], *parts)}
            sizes = [float(batch_size_of(part)) for part in parts]
            findings.append(find([runs[index] for index in pair], runs[both], sizes, counts))
        found = replace(findings[0].joined(findings[1:]), failed=tried.failed)
        for axis in ("data_parallel", "context_parallel", "tensor_parallel"):
            first, *others = objects.gather(found, self._mesh.group(axis))
            found = first.joined(others)
        return Outcome(StepLogs([], torch.zeros(0, 3, dtype=torch.float64, device=self._device)), output=found)

    def say_statistics(self) -> None:
        """One line, once, about layers that compute over what they see of a batch; for runs that are not tried."""
        layers, self._layers = self._layers, ()
        for name in layers:
            for path, child in self._module.get_submodule(name).named_modules(prefix=name):
                if isinstance(child, _BatchNorm) or type(child).__name__ == "_SpectralNorm":
                    rank_zero_info(
                        f"`{path}` ({type(child).__name__.lstrip('_')}), and whatever else in the layers computes "
                        "statistics in each forward, does so micro-batch by micro-batch; `whole_batch_loss=True` lets "
                        "it see whole batches."
                    )
                    return

    def _say(self, before: Reading, found: Finding, parts: int, why: str) -> None:
        """One line about what differs from the mean over samples, once."""
        now = self.reading
        if now.whole:
            stages = self._mesh.layout.pipeline
            if now.stays:
                what = "`whole_batch_loss=True`"
            elif now.writes:
                what = f"`training_step` writes `{now.writes}`, which the micro-batches of a batch do not write alike"
            elif found.failed:
                what = f"`training_step` does not run on two micro-batches by themselves ({found.failed})"
            else:
                whole, mean = found.numbers
                what = (
                    f"the loss of `training_step` is {whole:.6g} for two micro-batches at once, and {mean:.6g} as the "
                    "mean of their losses"
                )
            if self.around:
                rank_zero_info(
                    f"{what}. So that the step is that of one process, the layers run in {parts} micro-batches, and "
                    "the code before and behind them once on the whole batch: all forwards, then all backwards, with "
                    f"the activations of all {parts} micro-batches."
                )
                return
            idle = f", in which each of the {stages} stages is busy a {stages}th of the time" if stages > 1 else ""
            if self._apart:
                idle += f" (its layers cannot run in micro-batches: {self._apart})"
            said = (
                f"{what}. So that the step is that of one process, each batch runs whole{idle}, with the activations "
                f"of all {parts} micro-batches. A loss that is a mean over samples, or `micro_batch_loss_weight=...`, "
                "lets it run in micro-batches; `whole_batch_loss=False` takes the mean of their losses as it is."
            )
            rank_zero_info(said)
        elif now.way != (before.way if before.fits else None):
            what = "a sum" if now.way == "sum" else f"a mean over {now.way}"
            how = "added up" if now.way == "sum" else "weighted by their number of these"
            rank_zero_info(f"the loss of `training_step` is {what}: micro-batches are {how}.")
        if now.whole and before.settled and before.fits and why in ("time", "keys"):
            rank_zero_warn(
                f"up to step {self._steps - 1} the micro-batches' losses could not be told from those of a mean over "
                "their samples; those steps may differ from the steps of one process. Pass `whole_batch_loss=True`."
            )
        new = [key for key, how in now.logs.items() if not how and before.logs.get(key)]
        new += [key for key, how in now.logs.items() if not how and key not in before.logs]
        if new and not now.whole:
            rank_zero_info(
                f"what `self.log` is given as {', '.join(f'`{key}`' for key in new)} for a batch is not made of what "
                "its micro-batches give; the mean of theirs is logged. Log a torchmetrics object, or pass "
                "`whole_batch_loss=True`."
            )


class _Joins:
    """What a trial runs: some neighbouring micro-batches, each two neighbours at once, and four if two are too few.

    Args:
        batch: the whole.
        parts: its micro-batches, two or more.

    Attributes:
        pieces: in the order in which they run.
        joins: place of two or four at once among the pieces -> places of the one, the other, ...
    """

    def __init__(self, batch: Any, parts: Sequence[Any]) -> None:
        start = max(0, min(_pair(batch, parts) - 1, len(parts) - _PARTS))
        ends = list(accumulate((batch_size_of(part) for part in parts), initial=0))
        self.pieces = [parts[start]]
        self.joins: dict[int, tuple[int, ...]] = {}
        for index in range(start + 1, min(start + _PARTS, len(parts))):
            last = len(self.pieces)
            before = 0 if last == 1 else last - 2
            self.pieces += [parts[index], samples_of(batch, ends[index - 1], ends[index + 1])]
            self.joins[last + 1] = (before, last)
        if len(parts) > 2 and ends[start + 2] - ends[start] < _FEW:
            singles = [0, *(places[-1] for places in self.joins.values())][:_FEW]
            self.joins[len(self.pieces)] = tuple(singles)
            self.pieces.append(samples_of(batch, ends[start], ends[start + len(singles)]))
        self.pieces = [map_tensors(piece, torch.clone) for piece in self.pieces]


class _Tried:
    """The user's step on the pieces of a trial; leaves nothing behind.

    Attributes:
        failed: why it does not run on one of them, as far as the code behind the layers is concerned; or "".
    """

    def __init__(
        self, call: Callable[[Any], Any], recording: Recording, traces: Traces, joins: _Joins, stages: Stages
    ) -> None:
        self._call, self._recording, self.traces, self._joins = call, recording, traces, joins.joins
        self.draws, self._stages, self.failed = SameDraws(joins.joins), stages, ""
        self._changes: list[dict[Name, tuple[Any, Any]]] = [{} for _ in joins.pieces]
        self._runs, self._turns = [0 for _ in joins.pieces], dict[Name, int]()
        self._recorders: list[LogRecorder | None] = [None for _ in joins.pieces]

    def __call__(self, part: Any, index: int) -> Any:
        try:
            eager = torch.compiler.set_stance("force_eager")  # a layer first compiled here would stay uncompiled later
            with self._recording.step() as recorder, self.draws.run(index), eager:
                self._recorders[index] = recorder
                return map_tensors(self._call(part), torch.detach)
        except Exception as error:
            if isinstance(error, RemoteFailure) or is_echo(error) or not self._stages.is_behind_layers:
                raise
            self.failed = self.failed or f"{type(error).__name__}: {error}"
            return torch.tensor(math.nan, dtype=torch.float64)
        finally:
            with torch._C.DisableTorchFunction():  # a step that is watched must not read what other stages have
                changes = self.traces.changes()
                self.traces.put_back()
            self._changes[index] |= changes
            for name in changes:
                self._turns[name] = min(self._runs[index], self._turns.get(name, self._runs[index]))
            self._runs[index] += 1

    def written(self, layers: Sequence[str]) -> tuple[list[Name], str]:
        """What every part writes alike, and one value that has to be written by the whole batch, or ""."""
        joins = [([self._changes[index] for index in pair], self._changes[both]) for both, pair in self._joins.items()]
        return judge(joins, layers, self.traces.buffers)

    def turn(self, name: Name, layers: Sequence[str]) -> int | None:
        """In which of the runs of a piece, one for each virtual stage of this rank, a value is written: in that of its
        layer, or in each of them, by the code around the layers (``None``).
        """
        return self._turns[name] if name[0] in Parts(layers) else None

    def logs(self, device: torch.device) -> Iterator[dict[str, float]]:
        """What was logged as numbers, run by run."""
        for recorder in self._recorders:
            logs = recorder.collect(device) if recorder is not None else StepLogs([], torch.zeros(0, 3))
            plain = [(key.name, row) for key, row in zip(logs.keys, logs.rows, strict=True) if key.metric is None]
            yield {name: float(row[0]) for name, row in plain}


def _look_of(batch: Any) -> Any:
    """What of a batch tells kinds of batches apart: its tensors, but not how long they are."""
    size = batch_size_of(batch)
    return tuple((t.ndim, t.dtype, t.ndim > 0 and t.shape[0] == size) for t in tensors_of(batch))


def _narrowest(loss: Tensor, device: torch.device) -> torch.dtype:
    """Type of the loss, or that in which layers compute under autocast."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else loss.dtype


def _weighs_otherwise(ways: Sequence[Counted], used: Any, batch: Any, parts: Sequence[Any]) -> bool:
    """Whether counting would give the micro-batches of this batch other weights than those in use."""
    tensors = tensors_of(batch)
    places = dict.fromkeys((way.place, way.ignored) for way in ways)
    if isinstance(used, Counted):
        places[used.place, used.ignored] = None
    if not any(bool((tensors[place] == ignored).any()) for place, ignored in places):
        return False
    weigh: Callable[[Any], float] = used if isinstance(used, Counted) else batch_size_of
    weights = _shares([weigh(part) for part in parts])
    return any(_shares([way(part) for part in parts]) != weights for way in ways)


def _shares(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [round(weight / total, 9) for weight in weights] if total else []


def _pair(batch: Any, parts: Sequence[Any]) -> int:
    """The first of two neighbouring micro-batches that have as unlike numbers of targets as any."""
    best, place = 0.0, 0
    for way in candidates(batch, *parts):
        counts = [way(part) / batch_size_of(part) for part in parts]
        for index, (one, other) in enumerate(pairwise(counts)):
            unlike = abs(one - other) / max(one, other) if min(one, other) > 0 else 0.0
            if way.ignored == -100:
                unlike *= math.e  # torch's own mark for what is no target goes before a token that may be one
            if unlike > best + 1e-9:
                best, place = unlike, index
    return place
