"""GPipe and 1F1B: whole backwards, one chunk per stage; and GPipe for any placement of the chunks.

In 1F1B a stage runs as few forwards as possible before its first backward, so it holds the activations of at most
``stages - rank`` micro-batches instead of all of them (Narayanan et al., SC21, arXiv 2104.04473, section 2.2.1)::

    stage 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    stage 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    stage 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
"""

from __future__ import annotations

from dataclasses import replace

from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind, Schedule


def gpipe(stages: int, micro_batches: int) -> list[list[Instruction]]:
    """All forwards, then all backwards in the same order, on every stage.

    Args:
        stages: Number of stage ranks.
        micro_batches: Micro-batches per step.

    Returns:
        Per stage rank, its instructions.
    """
    forwards = [Instruction(Kind.FORWARD, index) for index in range(micro_batches)]
    backwards = [Instruction(Kind.BACKWARD, index) for index in range(micro_batches)]
    return [forwards + backwards for _ in range(stages)]


def one_forward_one_backward(stages: int, micro_batches: int) -> list[list[Instruction]]:
    """``min(stages - rank - 1, m)`` forwards, then forwards and backwards alternately, then the remaining backwards.

    Args:
        stages: Number of stage ranks.
        micro_batches: Micro-batches per step.

    Returns:
        Per stage rank, its instructions.
    """
    forwards = [Instruction(Kind.FORWARD, index) for index in range(micro_batches)]
    backwards = [Instruction(Kind.BACKWARD, index) for index in range(micro_batches)]
    return [alternate(forwards, backwards, stages - rank - 1) for rank in range(stages)]


def alternate(forwards: list[Instruction], backwards: list[Instruction], warm_up: int) -> list[Instruction]:
    """``warm_up`` forwards, then forwards and backwards alternately, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(forwards) - warm_up :]


def mirrored(forwards: Schedule) -> Schedule:
    """Append to each stage's forwards their backwards, last first: GPipe for any placement of the chunks.

    A loss of the whole batch can be computed when the last forward is done and not before, so no backward can come
    between the forwards. The backwards run in the mirror image of the forwards, which needs no order of its own to be
    found: where the forwards finish, their mirror image does, and it takes as long::

        stage 0  F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0
        stage 1  .. F0 F1 F2 F3 loss B3 B2 B1 B0 ..

    Args:
        forwards: forwards only, without transfers.

    Returns:
        The schedule of a training step, without transfers.

    Example:
        >>> from lightning_megatron.pipeline.schedules.by_name import make_schedule
        >>> both = mirrored(make_schedule("1f1b", stages=2, micro_batches=2, forward_only=True))
        >>> [str(step) for step in both.instructions[0]]
        ['F0.0', 'F1.0', 'B1.0', 'B0.0']
    """
    return replace(
        forwards, instructions=tuple((*steps, *map(_backward, reversed(steps))) for steps in forwards.instructions)
    )


def _backward(forward: Instruction) -> Instruction:
    return replace(forward, kind=Kind.BACKWARD)
