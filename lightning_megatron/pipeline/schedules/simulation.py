"""Simulates a schedule: how long it takes, how much of that is idle, and how many activations it holds.

A computation starts when its rank is free and its input has arrived; sends are asynchronous; a link carries one message
at a time. Nothing else is modelled. The times that the executor records in a run form the same :class:`Timeline` and
are drawn by the same functions, so simulated and measured timelines can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from operator import sub

from lightning_megatron.pipeline.schedules.check import activations_in_flight
from lightning_megatron.pipeline.schedules.dependencies import Costs, sweep, without_collector
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.schedules.lowering import describe_stuck


@dataclass(frozen=True)
class Timeline:
    """Start and end of every computation of one step, simulated or measured.

    Args:
        schedule: The computations, without transfers.
        starts: Per stage rank, start times in the order of its list, in the unit of the costs (seconds if measured).
        ends: Per stage rank, end times, likewise.
    """

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def start(self) -> float:
        """Time of the first start on any rank."""
        return min((times[0] for times in self.starts if times), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end on any rank."""
        return max((times[-1] for times in self.ends if times), default=0.0) - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank, the time spent computing."""
        rows = zip(self.starts, self.ends, strict=True)
        return tuple(math.fsum(map(sub, ends, starts)) for starts, ends in rows)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Per rank, the time from its own first start to its own last end."""
        return tuple(
            ends[-1] - starts[0] if starts else 0.0 for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank, the idle time inside its own span."""
        return tuple(span - busy for span, busy in zip(self.spans, self.busy, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """Idle over busy time: how much longer the longest span is than the average busy time of a rank.

        This is the bubble of the literature, (p-1)/m for 1F1B. It holds if ranks may start their next step at different
        times: the time that a rank waits before its first and after its last instruction is not counted. For GPipe,
        1F1B, interleaving and ZB-H1 the first stage spans the whole step, so for them both bubbles are equal.
        """
        work = sum(self.busy) / len(self.busy)
        return (max(self.spans) - work) / work if work else 0.0

    @property
    def step_bubble_fraction(self) -> float:
        """Idle over busy time if all ranks synchronize between steps: makespan over average busy time, minus one.

        This is the bubble of a step that ends with a collective over the pipeline, such as that of a global norm.
        """
        work = sum(self.busy) / len(self.busy)
        return (self.makespan - work) / work if work else 0.0

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Per rank, the peak number of chunks whose activations are held for a backward."""
        return activations_in_flight(self.schedule)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate a schedule with given costs.

    Args:
        schedule: With or without transfers; transfers are derived from the computations.
        costs: Times per virtual stage; by default one unit for each F, I and W (two for B) and free transfers.

    Returns:
        When every computation starts and ends.

    Raises:
        ValueError: If the schedule deadlocks (``check`` shows where) or the costs are for another number of stages.
    """
    if schedule.lowered:
        schedule = schedule.computations()
    with without_collector():
        found = sweep(schedule, costs or Costs.uniform(schedule.virtual_stages))
        if found.stuck:
            raise ValueError(f"schedule {schedule.name!r} never finishes: {describe_stuck(schedule, found.stuck)}")
        return Timeline(schedule, tuple(map(tuple, found.starts)), tuple(map(tuple, found.ends)))
