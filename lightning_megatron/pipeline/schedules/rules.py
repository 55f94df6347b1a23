"""Rules for the list of one rank: each computation and transfer occurs once, in a valid order.

For every chunk and micro-batch, the checker keeps a history of the instructions so far: input received, forward, result
sent, gradient received, backward whole or in halves, gradient sent. A history is a set of bits, so the check costs only
a few integer operations per instruction, also for lists of tens of thousands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightning_megatron.pipeline.schedules.dependencies import consumers
from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind, Schedule

Found = tuple[str, tuple[tuple[int, int], ...]]
"""A message, and (rank, position) of each instruction concerned; a position past the end stands for a missing one."""

# One bit per kind, and one for "the gradient of the input is computed", after a whole backward or its input half.
_BIT = {kind: 1 << number for number, kind in enumerate(Kind)}
_GRADIENT = 1 << len(_BIT)
_BACKWARD = _BIT[Kind.BACKWARD] | _GRADIENT
_INPUT = _BIT[Kind.BACKWARD_INPUT] | _GRADIENT
_WHOLE = _BIT[Kind.FORWARD] | _BACKWARD
_SPLIT = _BIT[Kind.FORWARD] | _INPUT | _BIT[Kind.BACKWARD_WEIGHT]


class _Rule(NamedTuple):
    """Bits that one kind of instruction on one chunk adds to a history, and that it needs and excludes before."""

    adds: int
    needs: int
    excludes: int
    peer: int | None = None


_Rules = dict[Kind, _Rule]


def find_disorder(schedule: Schedule) -> Found | None:
    """First instruction that is repeated, missing or too early in the list of its rank.

    Args:
        schedule: Well-formed; its transfers are checked too if it has any.

    Returns:
        The fault, or ``None``.
    """
    forward_only, lowered = schedule.forward_only, schedule.lowered
    for rank, steps in enumerate(schedule.instructions):
        rules = [_rules(schedule, rank, chunk, lowered) for chunk in range(schedule.chunks)]
        histories = [[0] * schedule.micro_batches for _ in range(schedule.chunks)]
        for at, step in enumerate(steps):
            history, rule = histories[step.chunk], rules[step.chunk].get(step.kind)
            before = history[step.micro_batch]
            if rule is None or step.peer != rule.peer or before & rule.excludes or before & rule.needs != rule.needs:
                return f"stage {rank}, entry {at}: {_describe(step, rule, before)}", ((rank, at),)
            history[step.micro_batch] = before | rule.adds
        for chunk, history in enumerate(histories):
            complete = _complete(rules[chunk], forward_only)
            for micro_batch, state in enumerate(history):
                if state not in complete:
                    missing = _missing(rules[chunk], forward_only, state)
                    message = f"stage {rank} never does {missing} of micro-batch {micro_batch} on chunk {chunk}"
                    return message, ((rank, len(steps)),)
    return None


def _rules(schedule: Schedule, rank: int, chunk: int, lowered: bool) -> _Rules:
    """The rules of one chunk; without transfers, inputs from other ranks are not required."""
    onward = _other_rank(schedule, rank, chunk, Kind.FORWARD) if lowered else None
    back = _other_rank(schedule, rank, chunk, Kind.BACKWARD) if lowered else None
    forward_needs = _BIT[Kind.RECV_FORWARD] if back is not None else 0
    backward_needs = _BIT[Kind.FORWARD] | (_BIT[Kind.RECV_BACKWARD] if onward is not None else 0)
    rules = {
        Kind.FORWARD: _Rule(_BIT[Kind.FORWARD], forward_needs, _BIT[Kind.FORWARD]),
        Kind.BACKWARD: _Rule(_BACKWARD, backward_needs, _GRADIENT),
        Kind.BACKWARD_INPUT: _Rule(_INPUT, backward_needs, _GRADIENT),
        Kind.BACKWARD_WEIGHT: _Rule(_BIT[Kind.BACKWARD_WEIGHT], _BIT[Kind.BACKWARD_INPUT], _BIT[Kind.BACKWARD_WEIGHT]),
    }
    if onward is not None:
        sent, received = _BIT[Kind.SEND_FORWARD], _BIT[Kind.RECV_BACKWARD]
        rules[Kind.SEND_FORWARD] = _Rule(sent, _BIT[Kind.FORWARD], sent, onward)
        rules[Kind.RECV_BACKWARD] = _Rule(received, 0, received | _GRADIENT, onward)
    if back is not None:
        sent, received = _BIT[Kind.SEND_BACKWARD], _BIT[Kind.RECV_FORWARD]
        rules[Kind.SEND_BACKWARD] = _Rule(sent, _GRADIENT, sent, back)
        rules[Kind.RECV_FORWARD] = _Rule(received, 0, received | _BIT[Kind.FORWARD], back)
    return rules


def _other_rank(schedule: Schedule, rank: int, chunk: int, kind: Kind) -> int | None:
    """The other rank that receives the result of ``kind`` on this chunk, or None if no other rank does."""
    target = consumers(schedule, rank, kind)[chunk]
    return None if target is None or target[0] == rank else target[0]


def _complete(rules: _Rules, forward_only: bool) -> tuple[int, ...]:
    """The histories that a micro-batch may end with."""
    forward = (Kind.RECV_FORWARD, Kind.FORWARD, Kind.SEND_FORWARD)
    if forward_only:
        return (sum(_BIT[kind] for kind in forward if kind in rules),)
    transfers = sum(_BIT[kind] for kind in rules if kind.is_transfer)
    return _WHOLE | transfers, _SPLIT | transfers


def _missing(rules: _Rules, forward_only: bool, state: int) -> str:
    """Name of the first instruction that a history lacks, in execution order."""
    for kind in _in_order(forward_only):
        if kind in rules and not state & _BIT[kind]:
            if kind is Kind.BACKWARD:
                if state & _GRADIENT:
                    continue
                return "B (or I and W)"
            if kind is Kind.BACKWARD_WEIGHT and state & _BIT[Kind.BACKWARD]:
                continue
            return str(kind.value)
    raise AssertionError(f"history {state:b} is complete")


def _in_order(forward_only: bool) -> Iterator[Kind]:
    yield from (Kind.RECV_FORWARD, Kind.FORWARD, Kind.SEND_FORWARD)
    if not forward_only:
        yield from (Kind.RECV_BACKWARD, Kind.BACKWARD, Kind.SEND_BACKWARD, Kind.BACKWARD_WEIGHT)


def _describe(step: Instruction, rule: _Rule | None, before: int) -> str:
    """Why ``step`` is not valid at this position."""
    if rule is None:
        return f"{step} moves a tensor that no other stage needs or makes"
    if step.peer != rule.peer:
        return f"{step} should name peer {rule.peer}"
    if before & _BIT[step.kind]:
        return f"{step} is done twice"
    if before & rule.excludes:
        if step.kind.is_receive:
            return f"{step} comes after the computation that needs it"
        return f"{step} repeats a backward that was done {'whole' if before & _BIT[Kind.BACKWARD] else 'in halves'}"
    lacking = rule.needs & ~before
    name = f"{step.micro_batch}.{step.chunk}"
    if lacking == _GRADIENT:
        return f"{step} comes before the backward whose gradient it sends"
    kind = next(kind for kind, bit in _BIT.items() if lacking & bit)
    words = {Kind.FORWARD: "its forward", Kind.BACKWARD_INPUT: "its input half"}
    return f"{step} comes before {words.get(kind, 'its receive')} {kind.value}{name}"
