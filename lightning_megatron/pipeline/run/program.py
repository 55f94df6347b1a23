"""A stage's list of instructions, worked out once so that running it is a plain loop.

The executor meets the same schedule every step. What depends on the schedule alone (which virtual stage an instruction
is, whether its neighbour is on this very rank, under which tag a message travels, where to wait for it) is found here
and kept as :class:`Slot`. A receive of the schedule becomes up to three actions::

    schedule   F1 ─────────── RF2 ── B0 ── F2            post early: buffers waiting while F1 still computes
    actions    early RF2, F1, RF2,   B0,   wait RF2, F2  (where the backend matches by tag); wait: right before use
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind, Schedule


class Action(Enum):
    """Action of the executor at a slot."""

    FORWARD = auto()
    BACKWARD = auto()
    BACKWARD_INPUT = auto()
    BACKWARD_WEIGHT = auto()
    SEND_FORWARD = auto()
    SEND_BACKWARD = auto()
    POST_FORWARD = auto()
    POST_BACKWARD = auto()
    POST_FORWARD_EARLY = auto()
    POST_BACKWARD_EARLY = auto()
    WAIT_FORWARD = auto()
    WAIT_BACKWARD = auto()
    FINAL = auto()


_ACTIONS = {
    Kind.FORWARD: Action.FORWARD,
    Kind.BACKWARD: Action.BACKWARD,
    Kind.BACKWARD_INPUT: Action.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT: Action.BACKWARD_WEIGHT,
    Kind.SEND_FORWARD: Action.SEND_FORWARD,
    Kind.SEND_BACKWARD: Action.SEND_BACKWARD,
    Kind.RECV_FORWARD: Action.POST_FORWARD,
    Kind.RECV_BACKWARD: Action.POST_BACKWARD,
}
_EARLY = {Kind.RECV_FORWARD: Action.POST_FORWARD_EARLY, Kind.RECV_BACKWARD: Action.POST_BACKWARD_EARLY}


@dataclass(frozen=True, slots=True)
class Slot:
    """One entry of a stage's program.

    Attributes:
        action: what to do.
        micro_batch: index of the micro-batch.
        place: ``(chunk, micro-batch)``, the key under which the executor keeps values.
        virtual: virtual stage of the chunk.
        peer: transfers: stage rank on the other side; otherwise -1.
        tag: transfers: tag of the message, the same on both sides.
        onward: computations: place on this rank that takes the result without a transfer, if any.
        position: position of the instruction in the schedule's list.
    """

    action: Action
    micro_batch: int
    place: tuple[int, int]
    virtual: int
    peer: int
    tag: int
    onward: tuple[int, int] | None
    position: int

    @property
    def is_of_backward(self) -> bool:
        """Whether it has to do with gradients."""
        return "FORWARD" not in self.action.name

    def in_words(self) -> str:
        """A description of this rank's action, for messages."""
        words = self.action.name.lower().split("_")
        what = {"wait": "arrival of the", "post": "receive of the", "send": "send of the"}.get(
            words[0], "computation of the"
        )
        direction = "forward" if "forward" in words else "backward"
        return f"{what} {direction} pass of micro-batch {self.micro_batch}, virtual stage {self.virtual}"


def compile_stage(schedule: Schedule, stage: int, *, post_early: bool) -> list[Slot]:
    """The program of one stage.

    Args:
        schedule: a lowered schedule.
        stage: stage rank.
        post_early: whether a receive may be posted before the computation that stands in front of it.
    """
    instructions = schedule.instructions[stage]
    slots: list[Slot] = []
    for position, instruction in enumerate(instructions):
        kind = instruction.kind
        if post_early and not kind.is_transfer:
            for ahead, receive in _receives_after(instructions, position):
                slots.append(_slot(schedule, stage, receive, _EARLY[receive.kind], ahead))
        wait = _wait_of(schedule, stage, instruction)
        if wait is not None:
            slots.append(_slot(schedule, stage, instruction, wait, position))
        slots.append(_slot(schedule, stage, instruction, _ACTIONS[kind], position))
    return slots


def _receives_after(instructions: Sequence[Instruction], position: int) -> Iterator[tuple[int, Instruction]]:
    """Receives between a computation and the next one, with their positions.

    The gradient of the very forward in front is left out: its shape is known once that forward has run.
    """
    computation = instructions[position]
    for ahead in range(position + 1, len(instructions)):
        instruction = instructions[ahead]
        if not instruction.kind.is_transfer:
            return
        own = instruction.chunk == computation.chunk and instruction.micro_batch == computation.micro_batch
        if instruction.kind.is_receive and not (own and computation.kind is Kind.FORWARD):
            yield ahead, instruction


def _wait_of(schedule: Schedule, stage: int, instruction: Instruction) -> Action | None:
    virtual = schedule.virtual_stage(stage, instruction.chunk)
    if instruction.kind is Kind.FORWARD:
        remote = virtual > 0 and schedule.owner(virtual - 1)[0] != stage
        return Action.WAIT_FORWARD if remote else None
    if instruction.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        remote = virtual < schedule.virtual_stages - 1 and schedule.owner(virtual + 1)[0] != stage
        return Action.WAIT_BACKWARD if remote else None
    return None


def _slot(schedule: Schedule, stage: int, instruction: Instruction, action: Action, position: int) -> Slot:
    kind = instruction.kind
    virtual = schedule.virtual_stage(stage, instruction.chunk)
    peer = -1 if instruction.peer is None else instruction.peer
    return Slot(
        action=action,
        micro_batch=instruction.micro_batch,
        place=(instruction.chunk, instruction.micro_batch),
        virtual=virtual,
        peer=peer,
        tag=_tag(schedule, kind, virtual) if kind.is_transfer else -1,
        onward=_onward(schedule, stage, instruction, virtual),
        position=position,
    )


def _tag(schedule: Schedule, kind: Kind, virtual: int) -> int:
    """Number of the (receiving chunk, direction): what two ranks can have several messages of under way at once."""
    receiver = virtual + {Kind.SEND_FORWARD: 1, Kind.SEND_BACKWARD: -1}.get(kind, 0)
    forward = kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    return 2 * schedule.owner(receiver)[1] + (0 if forward else 1)


def _onward(schedule: Schedule, stage: int, instruction: Instruction, virtual: int) -> tuple[int, int] | None:
    if instruction.kind.is_transfer or instruction.kind is Kind.BACKWARD_WEIGHT:
        return None
    taker = virtual + (1 if instruction.kind is Kind.FORWARD else -1)
    if not 0 <= taker < schedule.virtual_stages:
        return None
    rank, chunk = schedule.owner(taker)
    return (chunk, instruction.micro_batch) if rank == stage else None
