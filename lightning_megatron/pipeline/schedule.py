"""Pipeline schedules by name: the one door through which the rest of the package asks for a schedule.

Schedules are data (see :mod:`lightning_megatron.pipeline.instructions`). ``make_schedule`` returns what every stage
computes, in order; ``lower`` adds the sends and receives; the executor runs the lists and knows no schedule by name.
Pure Python, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from lightning_megatron.pipeline.instructions import Instruction, Kind, Placement, Schedule
from lightning_megatron.pipeline.lowering import lower
from lightning_megatron.pipeline.schedules import plain

__all__ = [
    "SCHEDULES",
    "Instruction",
    "Kind",
    "Placement",
    "Schedule",
    "ScheduleShape",
    "lower",
    "make_schedule",
    "schedule_shape",
]

UserSchedule = Callable[[int, int, int], Iterable[Iterable[Any]]]


class ScheduleShape(NamedTuple):
    """How a schedule cuts the model: chunks per stage rank and where they lie."""

    chunks: int
    placement: Placement


class _Entry(NamedTuple):
    """One named schedule: its builder and the chunk counts that it takes (``None``: any)."""

    build: Callable[..., list[list[Instruction]]]
    chunks: int | None = 1
    default_chunks: int = 1
    placement: Placement = Placement.LOOP


_TABLE: dict[str, _Entry] = {
    "gpipe": _Entry(lambda stages, chunks, count: plain.gpipe(stages, count)),
    "1f1b": _Entry(lambda stages, chunks, count: plain.one_forward_one_backward(stages, count)),
}
SCHEDULES: Sequence[str] = tuple(_TABLE)


def schedule_shape(schedule: str | UserSchedule, chunks: int | None = None) -> ScheduleShape:
    """Chunks per rank and placement of a schedule, before it is built; enough to cut the model.

    Args:
        schedule: A name of :data:`SCHEDULES` or a user's function.
        chunks: Chunks asked for; ``None`` takes the schedule's own number.

    Raises:
        ValueError: If the name is unknown or the schedule does not take that number of chunks.

    Example:
        >>> schedule_shape("1f1b")
        ScheduleShape(chunks=1, placement=<Placement.LOOP: 'loop'>)
    """
    if chunks is not None and chunks < 1:
        raise ValueError(f"chunks={chunks} (virtual_pipeline_parallel_size) must be at least 1")
    if callable(schedule):
        return ScheduleShape(chunks or 1, Placement.LOOP)
    entry = _lookup(schedule)
    if chunks is not None and entry.chunks is not None and chunks != entry.chunks:
        raise ValueError(
            f"schedule {schedule!r} puts {entry.chunks} chunk(s) on each stage, got chunks={chunks};"
            f" set virtual_pipeline_parallel_size={entry.chunks}"
        )
    return ScheduleShape(chunks or entry.default_chunks, entry.placement)


def make_schedule(
    schedule: str | UserSchedule,
    stages: int,
    micro_batches: int,
    *,
    chunks: int | None = None,
    forward_only: bool = False,
    **options: Any,
) -> Schedule:
    """Build a schedule of compute instructions.

    Args:
        schedule: A name of :data:`SCHEDULES`.
        stages: Number of stage ranks, p.
        micro_batches: Micro-batches per step, m; any number from 1.
        chunks: Model chunks per stage rank, v; ``None`` takes the schedule's own number.
        forward_only: Only forwards, for evaluation, with the chunks and placement of the named schedule.
        options: Further parameters of the named schedule.

    Returns:
        What every stage rank computes, in order, without transfers (see :func:`lower`).

    Raises:
        ValueError: If the name is unknown or a number does not suit the schedule.
    """
    for name, value in (("stages", stages), ("micro_batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    shape = schedule_shape(schedule, chunks)
    entry = _lookup(schedule)
    if forward_only:
        lists = plain.forward_only(stages, shape.chunks, micro_batches)
    else:
        lists = entry.build(stages, shape.chunks, micro_batches, **options)
    instructions = tuple(tuple(steps) for steps in lists)
    return Schedule(str(schedule), stages, shape.chunks, micro_batches, shape.placement, instructions)


def _lookup(name: str | UserSchedule) -> _Entry:
    if not isinstance(name, str) or name not in _TABLE:
        raise ValueError(f"unknown pipeline_schedule={name!r}; use one of {', '.join(_TABLE)}")
    return _TABLE[name]
