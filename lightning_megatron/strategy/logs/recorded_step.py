"""The user's step as micro-batches run it: its logs are told what they count, and it writes once per batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from lightning_megatron.mesh.batches import batch_size_of, map_tensors
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.strategy.logs.batch_writes import BatchWrites
from lightning_megatron.strategy.logs.combining import counts_for
from lightning_megatron.strategy.logs.metrics import Shares
from lightning_megatron.strategy.logs.step_logs import LogRecorder
from lightning_megatron.strategy.logs.weight_writes import WrittenInRuns
from lightning_megatron.strategy.loss.cuts import Cut
from lightning_megatron.strategy.loss.traces import LastStageWrites
from lightning_megatron.strategy.step.step_context import Recording

_NOTHING = nullcontext()


class Recorded:
    """The user's step, telling the recorder which micro-batch its logs belong to."""

    def __init__(
        self,
        call: Callable[[Any], Any],
        recorder: LogRecorder,
        parts: Sequence[Any],
        cut: Cut,
        writes: LastStageWrites,
        chunks: int,
        batches: BatchWrites | None,
        weights: WrittenInRuns,
    ) -> None:
        self._batches, self._parts, self._weights_written = batches, parts, weights
        weights.begin(len(parts), chunks)
        self._call, self._recorder, self._writes = call, recorder, writes
        self._chunks, self._left = chunks, [chunks] * len(parts)
        self._weights = cut.weights
        self._once = cut.once
        self._counts = counts_for(cut.logs, *parts)
        self._once.begin(parts, cut.weights, [count["sizes"] for count in self._counts])
        self._shares = shares_of(recorder, parts)

    def __call__(self, part: Any, index: int) -> Any:
        turn = self._chunks - self._left[index]
        self._recorder.begin_micro_batch(self._weights[index], self._counts[index], self._shares[index])
        self._left[index] -= 1
        with self._writes.undone() if self._left[index] else _NOTHING:
            self._once.put_back(turn)
            try:
                return self._call(part) if self._batches is None else self._on_copy(self._batches, part, index)
            finally:  # a stage ends its run by raising
                self._once.note(turn, last=not self._left[index])
                self._weights_written.check()

    def _on_copy(self, batches: BatchWrites, part: Any, index: int) -> Any:
        copy = batches.copied(part)
        try:
            return self._call(copy.value)
        finally:
            batches.note(copy, index, last=not self._left[index], alone=self._is_alone)

    def _is_alone(self, tensor: Tensor) -> bool:
        """Whether the step is run once on a tensor of a part: on its rows, and for one chunk of layers."""
        found: list[Tensor] = []
        map_tensors(self._parts, lambda each: found.append(each) or each)  # type: ignore[func-returns-value]
        return self._chunks == 1 and sum(each is tensor for each in found) == 1


def shares_of(recorder: LogRecorder, parts: Sequence[Any]) -> list[Shares]:
    """See :meth:`.MetricCalls.shares`.

    Args:
        recorder: of the step.
        parts: its micro-batches.
    """
    return [{} for _ in parts] if recorder.metric_calls is None else recorder.metric_calls.shares(parts)


class RecordedAround:
    """The user's step on a whole batch, of which the layers run in micro-batches: it writes and logs once."""

    def __init__(
        self,
        call: Callable[[Any], Any],
        recording: Recording,
        recorder: LogRecorder,
        cut: Cut,
        writes: tuple[LastStageWrites, LastStageWrites],
        *,
        reaches_end: bool,
        batches: BatchWrites,
        weights: WrittenInRuns,
        once: Parts,
    ) -> None:
        self._batches, self._weights_written = batches, weights
        weights.begin(len(cut.layers), 1)
        self._call, self._recording, self._recorder, self._writes = call, recording, recorder, writes
        self._once, self._weight, self._reaches_end = cut.once.around(once), cut.weights[0], reaches_end
        self._logs = cut.logs
        self._turns = [0] * len(cut.layers)
        sizes = [float(batch_size_of(part)) for part in cut.layers]
        self._once.begin(cut.layers, sizes, sizes)

    def layers(self, part: Any, index: int) -> Any:
        """On a micro-batch, for its layers."""
        turn = self._turns[index]
        self._turns[index] += 1
        alike: list[Any] = []
        try:
            with self._writes[0].undone(passes_on=False), self._recording.aside(), self._once.layers(turn, alike):
                return self._on_copy(part, last=False)
        finally:
            self._once.set_again(alike)
            self._weights_written.check()

    def before(self, batch: Any, _: int) -> Any:
        """On the whole batch, up to the layers."""
        self._once.put_back(0)
        try:
            if not self._reaches_end:
                return self._whole(batch, last=True)
            with self._writes[1].undone(), self._recording.aside():
                return self._whole(batch, last=False)
        finally:  # a stage ends its run by raising
            self._weights_written.check()  # the runs on micro-batches would write again

    def behind(self, batch: Any, _: int) -> Any:
        """On the whole batch, from the layers' output on."""
        self._once.put_back(0)
        (counts,), shares = counts_for(self._logs, batch), shares_of(self._recorder, [batch])[0]
        self._recorder.begin_micro_batch(self._weight, counts, shares)
        return self._whole(batch, last=True)

    def _whole(self, batch: Any, *, last: bool) -> Any:
        try:
            return self._on_copy(batch, last=last)
        finally:
            self._once.settle()

    def _on_copy(self, batch: Any, *, last: bool) -> Any:
        copy = self._batches.copied(batch)
        try:
            return self._call(copy.value)
        finally:
            self._batches.note(copy, 0, last=last, alone=lambda _: False)
