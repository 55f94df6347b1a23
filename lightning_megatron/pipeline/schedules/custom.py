"""Build a schedule from a user's function.

The function returns, per stage rank, the computations, either as :class:`Instruction` or in the notation of the grids:
``"F0"``, ``"B3"``, with more than one chunk ``"F0.1"``. The schedule is checked before anything runs, so that a mistake
gives an error with a grid and not a hang.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from lightning_megatron.pipeline.schedules.check import check
from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind, Placement, Schedule

UserSchedule = Callable[[int, int, int], Iterable[Iterable[Any]]]
"""``(stages, chunks, micro_batches)`` -> per stage rank, instructions or their names."""

_NAME = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")


def from_function(
    function: UserSchedule, stages: int, chunks: int, micro_batches: int, placement: Placement
) -> Schedule:
    """Call a user's function and check the schedule that it returns.

    Args:
        function: ``(stages, chunks, micro_batches) -> per-rank instructions``.
        stages: Number of stage ranks.
        chunks: Model chunks per stage rank.
        micro_batches: Micro-batches per step.
        placement: Which virtual stage each chunk is.

    Returns:
        The schedule, with the name of the function.

    Raises:
        ScheduleError: If the schedule could hang or lacks an instruction; the message shows its grid.
        ValueError: If the function does not return lists of instructions.
    """
    name = getattr(function, "__name__", type(function).__name__)
    lists = function(stages, chunks, micro_batches)
    try:
        instructions = tuple(tuple(parse(step) for step in steps) for steps in lists)
    except TypeError as error:
        raise ValueError(f"pipeline_schedule {name!r} must return a list of instructions per stage: {error}") from error
    schedule = Schedule(name, stages, chunks, micro_batches, placement, instructions)
    check(schedule)
    return schedule


def parse(step: Any) -> Instruction:
    """An instruction from its name in a grid; an :class:`Instruction` is returned unchanged.

    Raises:
        ValueError: If ``step`` is neither an instruction nor such a name.

    Example:
        >>> parse("F0"), str(parse("W3.1"))
        (Instruction(kind=<Kind.FORWARD: 'F'>, micro_batch=0, chunk=0, peer=None), 'W3.1')
    """
    if isinstance(step, Instruction):
        return step
    found = _NAME.fullmatch(step) if isinstance(step, str) else None
    if found is None:
        raise ValueError(f"{step!r} is no instruction: use an Instruction or a name such as 'F0', 'B3' or 'W2.1'")
    kind, micro_batch, chunk = found.groups()
    return Instruction(Kind(kind), int(micro_batch), int(chunk or 0))
