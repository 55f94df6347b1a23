"""Measured times: when each computation of a step started and ended on this rank.

Waiting for a message is not part of a computation, so a recorded step is a
:class:`~lightning_megatron.pipeline.timeline.Timeline` like a simulated one, with its gaps where the rank was idle. On
a CPU the clock is read around every computation; on a GPU events are put into the stream and read later, so that
recording does not hold the stream up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron.mesh.messages import objects
from lightning_megatron.pipeline.run.program import Action, Slot
from lightning_megatron.pipeline.schedules.dependencies import Costs
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.schedules.simulation import Timeline

_COMPUTATIONS = frozenset({Action.FORWARD, Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT})


class StepClock:
    """Times the computations of the latest training step on this rank.

    Args:
        device: where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._offset = time.time() - time.perf_counter()
        self._marks: list[tuple[Any, Any]] = []
        self._origin: tuple[Any, float] = (None, 0.0)
        self.schedule: Schedule | None = None

    def run(self, schedule: Schedule, program: Iterable[tuple[Callable[[Slot], None], Slot]]) -> None:
        """Run a program, noting its computations; the previous step's notes are dropped."""
        self.schedule, self._marks = schedule, []
        if self._cuda:
            torch.cuda.synchronize()
            self._origin = (self._mark(), time.perf_counter())
        for act, slot in program:
            if slot.action in _COMPUTATIONS:
                start = self._mark()
                act(slot)
                self._marks.append((start, self._mark()))
            else:
                act(slot)

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def rows(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Start and end times of the latest step, in seconds since the epoch, so that machines can be compared."""
        if self._cuda:
            torch.cuda.synchronize()
        starts = tuple(self._seconds(start) for start, _ in self._marks)
        return starts, tuple(self._seconds(end) for _, end in self._marks)

    def _seconds(self, mark: Any) -> float:
        if not self._cuda:
            return float(mark) + self._offset
        event, seconds = self._origin
        return float(event.elapsed_time(mark)) / 1e3 + seconds + self._offset


def gather_timeline(clock: StepClock, group: dist.ProcessGroup, ranks: Sequence[int]) -> Timeline | None:
    """The latest step of a whole pipeline; collective over the pipeline.

    Args:
        clock: this rank's.
        group: the pipeline's process group.
        ranks: its global ranks, first stage first.

    Returns:
        Times in seconds from the first start on, the same on every rank; ``None`` before the first training step.
    """
    rows = objects.gather(clock.rows(), group)
    if clock.schedule is None:
        return None
    by_rank = dict(zip(dist.get_process_group_ranks(group), rows, strict=True))
    ordered = [by_rank[rank] for rank in ranks]
    origin = min(starts[0] for starts, _ in ordered)
    shifted = [tuple(tuple(at - origin for at in times) for times in row) for row in ordered]
    return Timeline(clock.schedule.computations(), tuple(s for s, _ in shifted), tuple(e for _, e in shifted))


def measured_costs(timeline: Timeline) -> Costs:
    """Mean time of each kind of computation per virtual stage: what to simulate to predict this very step."""
    schedule = timeline.schedule
    spans: dict[tuple[str, int], list[float]] = {}
    for rank, steps in enumerate(schedule.instructions):
        for step, start, end in zip(steps, timeline.starts[rank], timeline.ends[rank], strict=True):
            key = (step.kind.value, schedule.virtual_stage(rank, step.chunk))
            spans.setdefault(key, []).append(end - start)
    mean = {key: sum(values) / len(values) for key, values in spans.items()}
    stages = range(schedule.virtual_stages)
    forward, backward_input, backward_weight, backward = (
        tuple(mean.get((kind, stage), 0.0) for stage in stages) for kind in "FIWB"
    )
    return Costs(forward, backward_input, backward_weight, backward if any(backward) else None)
