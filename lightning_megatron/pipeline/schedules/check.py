"""Refuse a schedule that would hang, compute wrong results or hold too many activations, before any rank runs it.

A wrong schedule is hard to debug, because all ranks wait for each other without a message. So everything that follows
from the lists alone is checked here, from the simplest fault to the subtlest:

1. every entry is an instruction for a chunk, micro-batch and peer that exist;
2. each rank does everything once and in order: forward before backward, input half before weight half, a result before
   its send, a receive before the computation that needs it;
3. all computations can finish: no ranks wait for each other in a circle;
4. each pair of ranks lists its messages in one order (NCCL has no tags);
5. the lists finish even if each send waits for its receive (and therefore also with asynchronous sends);
6. no rank holds more activations than the limit.

The error shows the first fault in the grid of the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.pipeline.schedules.dependencies import Costs, sweep, without_collector
from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind, Schedule
from lightning_megatron.pipeline.schedules.lowering import describe_stuck, lower_swept
from lightning_megatron.pipeline.schedules.rules import Found, find_disorder
from lightning_megatron.pipeline.schedules.text import list_grid
from lightning_megatron.pipeline.schedules.transfers import find_transfer_fault


@dataclass(frozen=True)
class Fault:
    """A fault of a schedule: where, and why.

    Args:
        message: What is wrong, with the values.
        marks: ``(rank, position in its list)`` of the instructions to mark; a position past the end of the list
            stands for a missing instruction.
    """

    message: str
    marks: tuple[tuple[int, int], ...] = ()


class ScheduleError(ValueError):
    """A schedule was refused; the message ends with its grid, in which ``!`` marks the fault.

    Args:
        schedule: The refused schedule, with or without transfers, as in the grid.
        fault: What is wrong with it.
    """

    def __init__(self, schedule: Schedule, fault: Fault) -> None:
        self.schedule = schedule
        self.fault = fault
        sizes = f"stages={schedule.stages}, chunks={schedule.chunks}, micro_batches={schedule.micro_batches}"
        grid = list_grid(schedule, fault.marks)
        super().__init__(f"pipeline_schedule {schedule.name!r} ({sizes}) was refused: {fault.message}\n\n{grid}")


def check(schedule: Schedule, *, activation_limit: int | None = None) -> None:
    """Raise if a schedule can hang, leaves something out, or holds too many activations.

    Args:
        schedule: With or without transfers; without, the transfers that ``lower`` adds are checked.
        activation_limit: The most forwards (chunks x micro-batches) without a finished backward allowed on a rank.

    Raises:
        ScheduleError: The schedule has a fault; the message has the first one and the grid.
    """
    with without_collector():
        _refuse(schedule, _malformed(schedule) or find_disorder(schedule))
        computations = schedule.computations() if schedule.lowered else schedule
        found = sweep(computations, Costs.uniform(schedule.virtual_stages))
        if found.stuck:
            message = f"it deadlocks, the ranks wait for each other: {describe_stuck(computations, found.stuck)}"
            _refuse(computations, (message, tuple(sorted(found.stuck.items()))))
        if not schedule.lowered:
            _refuse(schedule, _over_limit(schedule, activation_limit))
            schedule = lower_swept(schedule, found)
            _refuse(schedule, find_disorder(schedule))
        _refuse(schedule, find_transfer_fault(schedule) or _over_limit(schedule, activation_limit))


def activations_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the peak number of forwards whose backward (or weight half) has not run yet, in chunks.

    A forward-only schedule keeps no activations: 0 on every rank.
    """
    if schedule.forward_only:
        return (0,) * schedule.stages
    return tuple(_peak(steps)[0] for steps in schedule.instructions)


def _peak(steps: tuple[Instruction, ...]) -> tuple[int, int]:
    """The peak number of activations held, and the position of the forward that first reaches it."""
    forward, released = Kind.FORWARD, (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    held = most = position = 0
    for at, step in enumerate(steps):
        if step.kind is forward:
            held += 1
            if held > most:
                most, position = held, at
        elif step.kind in released:
            held -= 1
    return most, position


def _refuse(schedule: Schedule, found: Found | None) -> None:
    if found is not None:
        raise ScheduleError(schedule, Fault(*found))


def _malformed(schedule: Schedule) -> Found | None:
    if len(schedule.instructions) != schedule.stages:
        return f"it has {len(schedule.instructions)} lists of instructions for {schedule.stages} stages", ()
    for rank, steps in enumerate(schedule.instructions):
        for at, step in enumerate(steps):
            message = _malformed_step(schedule, rank, step)
            if message:
                return f"stage {rank}, entry {at}: {message}", ((rank, at),)
    return None


def _malformed_step(schedule: Schedule, rank: int, step: Instruction) -> str | None:
    if not isinstance(step, Instruction) or not isinstance(step.kind, Kind):
        return f"{step!r} is not an Instruction"
    if not 0 <= step.micro_batch < schedule.micro_batches:
        return f"{step} names micro-batch {step.micro_batch}; there are {schedule.micro_batches}, from 0"
    if not 0 <= step.chunk < schedule.chunks:
        return f"{step} names chunk {step.chunk}; each stage has {schedule.chunks}, from 0"
    if step.peer is None:
        return f"{step} is a transfer without a peer" if len(step.kind.value) > 1 else None
    if not step.kind.is_transfer:
        return f"{step} is a computation with a peer"
    if not 0 <= step.peer < schedule.stages or step.peer == rank:
        return f"{step} names peer {step.peer}; the others of {schedule.stages} stages are meant"
    return None


def _over_limit(schedule: Schedule, limit: int | None) -> Found | None:
    if limit is None or schedule.forward_only:
        return None
    for rank, steps in enumerate(schedule.instructions):
        most, at = _peak(steps)
        if most > limit:
            message = f"stage {rank} holds the activations of {most} forwards, activation_limit={limit}"
            return f"{message}; use a schedule with a lower peak or raise the limit", ((rank, at),)
    return None
