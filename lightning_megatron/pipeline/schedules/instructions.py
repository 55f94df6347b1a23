"""The types of which pipeline schedules consist: `Kind`, `Instruction`, `Placement` and `Schedule`.

A schedule is data: a list of instructions for every stage rank. The code that builds, checks, draws and runs schedules
depends on these four types only, not on each other. Pure Python: a schedule for thousands of ranks can be studied on a
laptop without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    """The kind of an instruction; the value is its letter in grids.

    ``BACKWARD`` is the whole backward of a chunk. Zero-bubble schedules split it into ``BACKWARD_INPUT`` (the gradient
    of the input, for which the previous stage waits) and ``BACKWARD_WEIGHT`` (the gradients of the chunk's parameters).
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"

    # Enum hashes by name, in Python code; checking a large schedule looks kinds up a million times.
    __hash__ = str.__hash__

    @property
    def is_send(self) -> bool:
        """Whether this sends a tensor to another stage rank."""
        return self in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)

    @property
    def is_receive(self) -> bool:
        """Whether this receives a tensor from another stage rank."""
        return self in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)

    @property
    def is_transfer(self) -> bool:
        """Whether this is a send or a receive, rather than a computation."""
        return self.is_send or self.is_receive


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of one stage rank.

    Args:
        kind: What to do.
        micro_batch: Index of the micro-batch, from 0.
        chunk: Local model chunk on this stage rank, from 0.
        peer: Transfers only: the stage rank on the other side.

    Example:
        >>> str(Instruction(Kind.FORWARD, 0, 1)), str(Instruction(Kind.SEND_FORWARD, 3, 0, peer=2))
        ('F0.1', 'SF3.0>2')
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.kind.value}{self.micro_batch}.{self.chunk}"
        if self.peer is None:
            return text
        return f"{text}{'>' if self.kind.is_send else '<'}{self.peer}"


class Placement(StrEnum):
    """The virtual stage of each chunk of a rank.

    With 3 stages and 2 chunks, written as ``rank: virtual stages of chunk 0, chunk 1``::

        LOOP   0: 0, 3    1: 1, 4    2: 2, 5      virtual stage = chunk * stages + rank
        VEE    0: 0, 5    1: 1, 4    2: 2, 3      down in chunk 0, back up in chunk 1
    """

    LOOP = "loop"
    VEE = "vee"


@dataclass(frozen=True)
class Schedule:
    """The instructions of every stage rank in one step, in order.

    Args:
        name: Name of the schedule, used in messages and drawings.
        stages: Number of stage ranks, p.
        chunks: Model chunks per stage rank, v.
        micro_batches: Micro-batches per step, m.
        placement: Which virtual stage each chunk is.
        instructions: One tuple of instructions per stage rank; stage 0 is the first.
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    placement: Placement
    instructions: tuple[tuple[Instruction, ...], ...]

    @property
    def virtual_stages(self) -> int:
        """Number of chunks of the whole model: stages x chunks per stage."""
        return self.stages * self.chunks

    @property
    def forward_only(self) -> bool:
        """Whether this schedule has no backwards, as in evaluation."""
        backward = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        return not any(step.kind in backward for steps in self.instructions for step in steps)

    @property
    def lowered(self) -> bool:
        """Whether the lists contain transfers."""
        return any(step.peer is not None for steps in self.instructions for step in steps)

    def computations(self) -> Schedule:
        """This schedule without its transfers."""
        lists = tuple(tuple(step for step in steps if step.peer is None) for steps in self.instructions)
        return replace(self, instructions=lists)

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """Position in the model, from 0, of ``chunk`` on stage ``rank``."""
        if self.placement is Placement.VEE and chunk % 2:
            return (chunk + 1) * self.stages - 1 - rank
        return chunk * self.stages + rank

    def owner(self, virtual_stage: int) -> tuple[int, int]:
        """The ``(rank, chunk)`` that holds ``virtual_stage``; the inverse of :meth:`virtual_stage`."""
        chunk, rank = divmod(virtual_stage, self.stages)
        if self.placement is Placement.VEE and chunk % 2:
            rank = self.stages - 1 - rank
        return rank, chunk
