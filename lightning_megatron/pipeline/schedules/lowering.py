"""Add sends and receives to a schedule of computations.

NCCL ignores tags: between two ranks, the n-th transfer posted by one matches the n-th posted by the other. So all
transfers of the pipeline are put in *one* order, sorted by the time at which each tensor is ready if a forward takes
one unit and a backward two, and every rank lists its sends, receives and computations in that order. Two ranks then
agree on the order for any schedule, and the lists cannot deadlock even if every send waits for its receive::

    stage 0  F0 SF0>1 F1 SF1>1 ..                   RB0<1 B0
    stage 1        RF0<0 F0    RF1<0 B0 SB0>0 ..

A send directly follows the computation that made the tensor. A receive is at the position of its send, which may be
some computations before the one that needs the tensor: it *posts* the receive, and only that computation waits for it.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_megatron.pipeline.schedules.dependencies import Costs, Sweep, consumers, sweep, without_collector
from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind, Schedule

# (time, 0 for a transfer and 1 for a computation, rank, position). Both ranks of a transfer sort it by the same four
# numbers, those of the computation that made the tensor. No two entries of a list have the same numbers.
_Entry = tuple[float, int, int, int, Instruction]


def lower(schedule: Schedule) -> Schedule:
    """Add to each rank's list the sends and receives that its computations need.

    Consecutive virtual stages on one rank (the turn of a VEE placement, or a pipeline of one stage) need no transfer.
    The ``chunk`` of a transfer is the local chunk that made the tensor (sends) or that needs it (receives).

    Args:
        schedule: As ``make_schedule`` returns it. A schedule that has transfers already is returned unchanged.

    Returns:
        The same schedule with transfers.

    Raises:
        ValueError: If the computations themselves can never finish.
    """
    if schedule.lowered:
        return schedule
    with without_collector():
        found = sweep(schedule, Costs.uniform(schedule.virtual_stages))
        if found.stuck:
            raise ValueError(f"schedule {schedule.name!r} never finishes: {describe_stuck(schedule, found.stuck)}")
        return lower_swept(schedule, found)


def lower_swept(schedule: Schedule, found: Sweep) -> Schedule:
    """:func:`lower` for a sweep that has been done; a sweep with any positive costs gives a valid order."""
    entries: list[list[_Entry]] = [[] for _ in range(schedule.stages)]
    for rank in range(schedule.stages):
        _add_entries(schedule, rank, found.starts[rank], found.ends[rank], entries)
    for own in entries:
        own.sort()
    return replace(schedule, instructions=tuple(tuple([entry[4] for entry in own]) for own in entries))


def _add_entries(
    schedule: Schedule, rank: int, starts: list[float], ends: list[float], entries: list[list[_Entry]]
) -> None:
    """Add the computations and sends of ``rank`` to its entries, and the matching receives to those of its peers."""
    onward = consumers(schedule, rank, Kind.FORWARD)
    back = consumers(schedule, rank, Kind.BACKWARD)
    own = entries[rank]
    for at, step in enumerate(schedule.instructions[rank]):
        own.append((starts[at], 1, rank, at, step))
        if step.kind is Kind.BACKWARD_WEIGHT:
            continue
        forward = step.kind is Kind.FORWARD
        target = onward[step.chunk] if forward else back[step.chunk]
        if target is None or target[0] == rank:
            continue
        peer, chunk = target
        send = Instruction(Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD, step.micro_batch, step.chunk, peer)
        receive = Instruction(Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD, step.micro_batch, chunk, rank)
        own.append((ends[at], 0, rank, at, send))
        entries[peer].append((ends[at], 0, rank, at, receive))


def describe_stuck(schedule: Schedule, stuck: dict[int, int]) -> str:
    """Text for messages that says in which instruction each stuck rank waits."""
    waits = [f"stage {rank} waits in {schedule.instructions[rank][at]}" for rank, at in sorted(stuck.items())[:4]]
    more = f" and {len(stuck) - 4} others" if len(stuck) > 4 else ""
    return ", ".join(waits) + more


def join_halves(schedule: Schedule) -> Schedule:
    """Join the two halves of a backward where no stage waits for the first: only receives lie between them.

    A split backward costs more than a whole one, so it only pays where another stage can continue earlier::

        stage 0   F1 I0 W0 F2 I1 W1 ..      becomes   F1 B0 F2 B1 ..
        stage 1   F0 I0 SB0>0 W0 F1 ..      stays as it is

    Args:
        schedule: a lowered schedule.

    Returns:
        The schedule with joined backwards; transfers keep their order.
    """
    return replace(schedule, instructions=tuple(_joined(steps) for steps in schedule.instructions))


def _joined(steps: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    joined: list[Instruction] = []
    half: int | None = None
    for step in steps:
        if half is not None and not step.kind.is_receive:
            first = joined[half]
            if step == replace(first, kind=Kind.BACKWARD_WEIGHT):
                del joined[half]
                step = replace(first, kind=Kind.BACKWARD)
            half = None
        if step.kind is Kind.BACKWARD_INPUT:
            half = len(joined)
        joined.append(step)
    return tuple(joined)


def halve_backwards(schedule: Schedule) -> Schedule:
    """Split the whole backwards of a schedule that splits others.

    All weight gradients of linears are then separate products, which are accumulated in float32 without being rounded
    to 16 bits first.

    Args:
        schedule: a lowered schedule.

    Returns:
        The schedule, with the sends of a backward right after its input half; unchanged if it splits no backward.
    """
    if not any(step.kind is Kind.BACKWARD_WEIGHT for steps in schedule.instructions for step in steps):
        return schedule
    return replace(schedule, instructions=tuple(_halved(steps) for steps in schedule.instructions))


def _halved(steps: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    halved: list[Instruction] = []
    second: Instruction | None = None
    for step in steps:
        if second is not None and not step.kind.is_transfer:
            halved.append(second)
            second = None
        if step.kind is Kind.BACKWARD:
            second = replace(step, kind=Kind.BACKWARD_WEIGHT)
            step = replace(step, kind=Kind.BACKWARD_INPUT)
        halved.append(step)
    return tuple(halved) if second is None else (*halved, second)
