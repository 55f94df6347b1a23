"""GPipe and 1F1B: whole backwards, one chunk per stage.

In 1F1B a stage runs as few forwards as possible before its first backward, so it holds the activations of at most
``stages - rank`` micro-batches instead of all of them (Narayanan et al., SC21, arXiv 2104.04473, section 2.2.1)::

    stage 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    stage 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    stage 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
"""

from __future__ import annotations

from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind


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
