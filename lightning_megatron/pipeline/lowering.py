"""Add sends and receives to a schedule of compute instructions.

NCCL ignores tags: between two ranks the n-th transfer posted by one meets the n-th posted by the other. So the
transfers of the whole pipeline are put in *one* order, that of the moment at which each tensor is ready when forwards
take one unit and backwards two, and every rank lists its sends, receives and computations in that order. Two ranks can
then never disagree, whatever the schedule, and the lists cannot deadlock even if every send waited for its receive::

    stage 0  F0 SF0>1 F1 SF1>1 ..                   RB0<1 B0
    stage 1        RF0<0 F0    RF1<0 B0 SB0>0 ..

A send stands right behind the computation that made the tensor. A receive stands where the tensor is sent, which may be
some computations ahead of the one that needs it: it *posts* the receive, and the computation that needs it waits.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_megatron.pipeline.dependencies import Durations, sweep
from lightning_megatron.pipeline.instructions import Instruction, Kind, Schedule

_Entry = tuple[float, int, int, int, Instruction]  # time, transfers first, tie-break, position in list, instruction


def lower(schedule: Schedule) -> Schedule:
    """Add to each rank's list the sends and receives that its computations need.

    Neighbouring virtual stages on one rank (the turn of a VEE placement, or a pipeline of one stage) need no transfer.
    In a transfer ``chunk`` is the local chunk that made the tensor (sends) or that needs it (receives).

    Args:
        schedule: Compute instructions only; checked or made by ``make_schedule``.

    Returns:
        The same schedule with transfers.

    Raises:
        ValueError: If the compute instructions themselves can never finish.
    """
    found = sweep(schedule, Durations.uniform(schedule.virtual_stages))
    if found.stuck:
        raise ValueError(f"schedule {schedule.name!r} never finishes: {describe_stuck(schedule, found.stuck)}")
    entries: list[list[_Entry]] = [[] for _ in range(schedule.stages)]
    for rank, steps in enumerate(schedule.instructions):
        for at, step in enumerate(steps):
            entries[rank].append((found.starts[rank][at], 1, rank, at, step))
            _add_transfer(schedule, entries, rank, at, step, found.ends[rank][at])
    ordered = tuple(tuple(entry[4] for entry in sorted(own, key=_sort_key)) for own in entries)
    return replace(schedule, instructions=ordered)


def describe_stuck(schedule: Schedule, stuck: dict[int, int]) -> str:
    """Say which instruction each stuck rank waits in, for messages."""
    waits = [f"stage {rank} waits in {schedule.instructions[rank][at]}" for rank, at in sorted(stuck.items())[:4]]
    more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
    return ", ".join(waits) + more


def _sort_key(entry: _Entry) -> tuple[float, int, int, int]:
    return entry[:4]


def _add_transfer(
    schedule: Schedule, entries: list[list[_Entry]], rank: int, at: int, step: Instruction, ready: float
) -> None:
    """Put the send of ``step``'s result in this rank's list and the receive in its peer's, if there is one."""
    piece = schedule.virtual_stage(rank, step.chunk)
    if step.kind is Kind.FORWARD:
        target, send, receive = piece + 1, Kind.SEND_FORWARD, Kind.RECV_FORWARD
    elif step.kind is not Kind.BACKWARD_WEIGHT:
        target, send, receive = piece - 1, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD
    else:
        return
    if not 0 <= target < schedule.virtual_stages:
        return
    peer, chunk = schedule.owner(target)
    if peer == rank:
        return
    # The pair (sending rank, position) breaks ties in the same way on both sides.
    entries[rank].append((ready, 0, rank, at, Instruction(send, step.micro_batch, step.chunk, peer)))
    entries[peer].append((ready, 0, rank, at, Instruction(receive, step.micro_batch, chunk, rank)))
