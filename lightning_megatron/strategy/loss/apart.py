"""Whether the layers may run in micro-batches where the loss is one of the whole batch, found out by trying.

They may where each of them computes sample by sample, and where the code after them asks for nothing but the last
one's output. Two micro-batches are run in four ways, forward only (or all of a batch, where the loss of two of them
tells nothing); what is equal must be::

    whole     the user's step on both at once                          ┐ equal: the code around the layers
    joined    before(both) ─▶ layers(both) ─▶ behind(both)             ┘ can run by itself

    apart     before(both) ─▶ layers(one), layers(other) ─▶ behind     ┐ equal: layers compute sample by sample;
    again     before(both) ─▶ layers(both) ─▶ behind                   ┘ random numbers of layers as in ``apart``

Losses, logged numbers, and of the last two what the layers give: a loss may be zero whatever they give. And what the
step writes on the module, the code around the layers has to write by itself: a codebook between two layers that keeps
running means of the batch would see micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.mesh.batches import map_tensors
from lightning_megatron.mesh.draws.same_draws import SameDraws
from lightning_megatron.mesh.watch.echoes import RemoteFailure, is_echo
from lightning_megatron.pipeline.run.around import WholeBatch
from lightning_megatron.pipeline.run.executor import PipelineExecutor
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep, loss_of
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.stage.final_state import TRIAL
from lightning_megatron.strategy.logs.batch_copies import whole_copy
from lightning_megatron.strategy.logs.step_logs import LogRecorder
from lightning_megatron.strategy.loss.tables import Name
from lightning_megatron.strategy.loss.traces import Traces
from lightning_megatron.strategy.step.step_context import Recording

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5}  # relative, of a loss or logged value
_NARROW = 2e-3
_OF_TENSORS = 10.0  # times as much, of what layers give: no mean evens out how it is rounded
_NOTHING = nullcontext()


class AroundTrial:
    """Runs two micro-batches in the four ways; leaves nothing behind.

    Args:
        call: the user's step, taking a (micro-)batch.
        recording: of the logs.
        traces: of the module, to be put back.
        parts: neighbouring micro-batches.
        both: all of them at once.
        schedule: gives the schedule of a forward of so many micro-batches.
        use_rows: told of which samples the micro-batches are that run next.
        is_behind: whether this rank has come past the layers, so that no other one waits for it.
    """

    def __init__(
        self,
        call: Callable[[Any], Any],
        recording: Recording,
        traces: Traces,
        parts: Sequence[Any],
        both: Any,
        schedule: Callable[[int], Schedule],
        use_rows: Callable[[Sequence[Any]], None],
        is_behind: Callable[[], bool],
    ) -> None:
        self._call, self._recording, self._traces = call, recording, traces
        self._parts, self._both, self._schedule = list(parts), both, schedule
        self._use_rows, self._is_behind = use_rows, is_behind
        self._draws = SameDraws({len(parts): tuple(range(len(parts)))})
        self._given: list[Sequence[Tensor]] = []
        self._found: list[tuple[Any, LogRecorder]] = []
        self._writes: dict[bool, set[Name]] = {False: set(), True: set()}
        self.failed, self.before = "", set[Name]()

    def run(self, executor: PipelineExecutor) -> None:
        """Run all four, as far as this rank's stages go."""
        whole = PipelineStep(self._schedule(1), partial(self._recorded, around=False), [self._both], TRIAL)
        self._use_rows([self._both])
        executor.run(whole)
        self._around(executor, [self._both], lambda index: _NOTHING)
        self._around(executor, self._parts, lambda index: self._draws.run(index))
        self._around(executor, [self._both], lambda index: self._draws.run(len(self._parts)))

    def _around(
        self, executor: PipelineExecutor, parts: list[Any], around: Callable[[int], AbstractContextManager[None]]
    ) -> None:
        def layers(part: Any, index: int) -> Any:
            with around(index), self._recording.aside():
                return self._alone(part)

        def before(batch: Any, _: int) -> Any:
            with self._recording.aside():
                return self._alone(batch, self._writes[True], self.before)

        whole = WholeBatch(self._both, before, self._recorded)
        self._use_rows(parts)
        executor.run(PipelineStep(self._schedule(len(parts)), layers, parts, TRIAL, whole=whole))
        self.failed = self.failed or whole.failed
        self._given.append(whole.given)

    def _recorded(self, batch: Any, _: int, *, around: bool = True) -> Any:
        with self._recording.step() as recorder:
            try:
                output = self._alone(batch, self._writes[around])
            except Exception as error:
                if around or isinstance(error, RemoteFailure) or is_echo(error) or not self._is_behind():
                    raise
                self.failed = f"{type(error).__name__}: {error}"  # as the step itself will, with the right message
                return torch.tensor(math.nan, dtype=torch.float64)
        self._found.append((output, recorder))
        return output

    def _alone(self, batch: Any, *writes: set[Name]) -> Any:
        try:
            eager = torch.compiler.set_stance("force_eager")  # a layer first compiled here would stay uncompiled later
            with self._traces.noted(), eager:
                return map_tensors(self._call(whole_copy(batch)), torch.detach)
        finally:
            with torch._C.DisableTorchFunction():  # a step that is watched must not read what other stages have
                changes = self._traces.changes() if writes else {}
                for names in writes:
                    names.update(changes)
                self._traces.put_back()

    def written(self) -> tuple[set[Name], set[Name]]:
        """Writes of this rank's stages in a step on the whole batch, and those of the code around the layers."""
        return self._writes[False], self._writes[True]

    def verdict(self, device: torch.device, narrowest: Callable[[Tensor], torch.dtype]) -> str:
        """Why the layers cannot run in micro-batches; "" if they can. On the stage that computes the loss.

        Args:
            device: where tensors live.
            narrowest: the narrowest type in which a loss was computed.
        """
        if self.failed or len(self._found) != 4:
            return self.failed or "the code after the layers does not run by itself"
        numbers = [_numbers(output, recorder, device) for output, recorder in self._found]
        if not math.isfinite(numbers[0]["loss"]):
            return f"the loss is {numbers[0]['loss']}"
        dtype = narrowest(loss_of(self._found[0][0]))
        tolerance = _TOLERANCE.get(dtype, _NARROW)
        across = "they compute over the samples that they see"
        if not all(_alike(one, other, tolerance) for one, other in zip(*self._given[1:], strict=True)):
            return across
        whole, joined, apart, again = numbers
        for one, other, why in (
            (whole, joined, "the code after them needs more than the output of the last one"),
            (apart, again, across),
        ):
            if one.keys() != other.keys() or not all(_close(one[key], other[key], tolerance) for key in one):
                return why
        return ""


def _numbers(output: Any, recorder: LogRecorder, device: torch.device) -> dict[str, float]:
    """The loss, and what was logged as numbers."""
    logs = recorder.collect(device)
    plain = {f"log {key.name}": float(row[0]) for key, row in zip(logs.keys, logs.rows, strict=True)}
    return {"loss": float(loss_of(output).detach()), **plain}


def _alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    narrow = _NARROW if one.dtype not in _TOLERANCE else 0.0
    one, other = one.double(), other.double()
    return bool((one - other).norm() <= _OF_TENSORS * max(tolerance, narrow) * max(one.norm(), other.norm()))


def _close(one: float, other: float, tolerance: float) -> bool:
    if math.isnan(one) and math.isnan(other):
        return True
    return abs(one - other) <= tolerance * max(abs(one), abs(other))
