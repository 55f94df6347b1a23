"""Refuse a schedule that would hang, compute nonsense or hold too much, before a single process depends on it.

A wrong schedule fails in the worst way: all ranks wait for each other without a word. So everything that can be known
from the lists alone is checked here, from the plainest fault to the subtlest:

1. every entry is an instruction for a chunk, micro-batch and peer that exist;
2. each rank computes every micro-batch on every chunk once, forward before backward, input half before weight half;
3. the computations can all finish: no rank waits for another that waits for it;
4. transfers carry what computations need, and each pair of ranks lists them in one order (NCCL has no tags);
5. the lists finish even if each send waits for its receive (and so with asynchronous sends too);
6. no rank holds more activations than it was allowed.

The first fault found is shown in the schedule's grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.pipeline.dependencies import Costs, sweep, without_collector
from lightning_megatron.pipeline.drawing import list_grid
from lightning_megatron.pipeline.instructions import Instruction, Kind, Schedule
from lightning_megatron.pipeline.lowering import lower
from lightning_megatron.pipeline.transfers import find_transfer_fault

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = 1, 2, 4, 8
_BITS = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _BACKWARD,
    Kind.BACKWARD_INPUT: _INPUT,
    Kind.BACKWARD_WEIGHT: _WEIGHT,
}
# What must and must not have happened on the same rank before each kind.
_NEEDS = {Kind.BACKWARD: _FORWARD, Kind.BACKWARD_INPUT: _FORWARD, Kind.BACKWARD_WEIGHT: _INPUT}
_EXCLUDES = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _BACKWARD | _INPUT | _WEIGHT,
    Kind.BACKWARD_INPUT: _BACKWARD | _INPUT,
    Kind.BACKWARD_WEIGHT: _WEIGHT,
}
_COMPLETE = (_FORWARD | _BACKWARD, _FORWARD | _INPUT | _WEIGHT)


@dataclass(frozen=True)
class Fault:
    """Where a schedule is wrong and why.

    Args:
        message: What is wrong, with the values.
        marks: ``(rank, position in its list)`` of the instructions to mark; a position behind the end of the list
            stands for something missing.
    """

    message: str
    marks: tuple[tuple[int, int], ...] = ()


class ScheduleError(ValueError):
    """A schedule was refused; the message ends with its grid, the fault marked by ``!``.

    Args:
        schedule: The refused schedule.
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
        schedule: With or without transfers; without, those that ``lower`` adds are checked.
        activation_limit: Most forwards (chunks x micro-batches) whose backward is still to come, on any rank.

    Raises:
        ScheduleError: With the first fault and the grid that shows it.
    """
    with without_collector():
        _refuse(schedule, _malformed(schedule) or _incomplete(schedule))
        computations = schedule.computations() if schedule.lowered else schedule
        _refuse(computations, _cyclic(computations))
        lowered = lower(schedule)
        _refuse(lowered, _transfers(lowered))
        if activation_limit is not None:
            _refuse(schedule, _over_limit(schedule, activation_limit))


def activations_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most forwards whose backward (or weight half) is still to come, in chunks.

    A forward-only schedule holds nothing for a backward: 0 everywhere.
    """
    if schedule.forward_only:
        return (0,) * schedule.stages
    return tuple(_peak(steps)[0] for steps in schedule.instructions)


def _peak(steps: tuple[Instruction, ...]) -> tuple[int, int]:
    """The most activations held at once, and the position of the forward that first reaches it."""
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


def _refuse(schedule: Schedule, fault: Fault | None) -> None:
    if fault is not None:
        raise ScheduleError(schedule, fault)


def _malformed(schedule: Schedule) -> Fault | None:
    if len(schedule.instructions) != schedule.stages:
        return Fault(f"it has {len(schedule.instructions)} lists of instructions for {schedule.stages} stages")
    for rank, steps in enumerate(schedule.instructions):
        for at, step in enumerate(steps):
            message = _malformed_step(schedule, rank, step)
            if message:
                return Fault(f"stage {rank}, entry {at}: {message}", ((rank, at),))
    return None


def _malformed_step(schedule: Schedule, rank: int, step: Instruction) -> str | None:
    if not isinstance(step, Instruction) or not isinstance(step.kind, Kind):
        return f"{step!r} is not an Instruction"
    if not 0 <= step.micro_batch < schedule.micro_batches:
        return f"{step} names micro-batch {step.micro_batch}; there are {schedule.micro_batches}, from 0"
    if not 0 <= step.chunk < schedule.chunks:
        return f"{step} names chunk {step.chunk}; each stage has {schedule.chunks}, from 0"
    if step.peer is None:
        return f"{step} is a transfer without a peer" if step.kind.is_transfer else None
    if not step.kind.is_transfer:
        return f"{step} is a computation with a peer"
    if not 0 <= step.peer < schedule.stages or step.peer == rank:
        return f"{step} names peer {step.peer}; the others of {schedule.stages} stages are meant"
    return None


def _incomplete(schedule: Schedule) -> Fault | None:
    """Fault number 2, in one pass over each list."""
    forward_only = schedule.forward_only
    for rank, steps in enumerate(schedule.instructions):
        done = [0] * (schedule.chunks * schedule.micro_batches)
        for at, step in enumerate(steps):
            if step.peer is not None:
                continue
            kind, slot = step.kind, step.chunk * schedule.micro_batches + step.micro_batch
            before = done[slot]
            if before & _EXCLUDES[kind] or before & (need := _NEEDS.get(kind, 0)) != need:
                return Fault(f"stage {rank}, entry {at}: {_disorder(step, before)}", ((rank, at),))
            done[slot] = before | _BITS[kind]
        for slot, state in enumerate(done):
            if state != _FORWARD if forward_only else state not in _COMPLETE:
                chunk, micro_batch = divmod(slot, schedule.micro_batches)
                return Fault(_missing(rank, state, micro_batch, chunk), ((rank, len(steps)),))
    return None


def _disorder(step: Instruction, before: int) -> str:
    if before & _BITS[step.kind]:
        return f"{step} is done twice"
    if step.kind is Kind.BACKWARD_WEIGHT:
        return f"{step} comes before its input half I{step.micro_batch}.{step.chunk}"
    if not before & _FORWARD:
        return f"{step} comes before its forward F{step.micro_batch}.{step.chunk}"
    return f"{step} repeats a backward that was done in {'one piece' if before & _BACKWARD else 'halves'}"


def _missing(rank: int, state: int, micro_batch: int, chunk: int) -> str:
    names = {0: "F", _FORWARD: "B (or I and W)", _FORWARD | _INPUT: "W"}
    return f"stage {rank} never does {names.get(state, 'F')} of micro-batch {micro_batch} on chunk {chunk}"


def _cyclic(schedule: Schedule) -> Fault | None:
    stuck = sweep(schedule, Costs.slots(schedule.virtual_stages)).stuck
    if not stuck:
        return None
    waits = [f"stage {rank} in {schedule.instructions[rank][at]}" for rank, at in sorted(stuck.items())]
    shown = ", ".join(waits[:4]) + (f" and {len(waits) - 4} more" if len(waits) > 4 else "")
    return Fault(f"it deadlocks: the ranks wait for each other, {shown}", tuple(sorted(stuck.items())))


def _transfers(lowered: Schedule) -> Fault | None:
    found = find_transfer_fault(lowered)
    return None if found is None else Fault(*found)


def _over_limit(schedule: Schedule, limit: int) -> Fault | None:
    if schedule.forward_only:
        return None
    for rank, steps in enumerate(schedule.instructions):
        most, at = _peak(steps)
        if most > limit:
            message = f"stage {rank} holds the activations of {most} forwards, activation_limit={limit}"
            return Fault(f"{message}; use a schedule with a lower peak or raise the limit", ((rank, at),))
    return None
