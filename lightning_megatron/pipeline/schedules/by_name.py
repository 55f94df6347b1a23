"""Pipeline schedules by name.

Schedules are data (see ``pipeline.schedules.instructions``). ``make_schedule`` returns the computations of every stage,
in order; ``lower`` adds the sends and receives; the executor runs the lists and does not depend on the name. Pure
Python, without torch.

========== ====== ========= ==================== =============================== ==============================
name       chunks placement idle time per rank   activations in flight           options
========== ====== ========= ==================== =============================== ==============================
gpipe      1      loop      (p-1)(F+B)           m
1f1b       1      loop      (p-1)(F+B)           p-r on rank r
interleaved v     loop      (p-1)(F+B)/v         up to pv+p-1 chunks (N = p)     ``group_size`` (N), at least p
zb-h1      1      loop      (p-1)(F+I-W)         p
zb-h2      1      loop      (p-1)(F+I-2W)        2p-1                            ``memory_limit``, p to 2p-1
zb-v       2      vee       0 if F = I = W       2p chunks (half a stage each)
dualpipe-v 2      vee       see the docs         2p+1 chunks
========== ====== ========= ==================== =============================== ==============================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_megatron.pipeline.schedules import interleaved, plain, vee, zero_bubble
from lightning_megatron.pipeline.schedules.custom import UserSchedule, from_function
from lightning_megatron.pipeline.schedules.instructions import Instruction, Placement, Schedule


class ScheduleShape(NamedTuple):
    """How a schedule cuts the model: chunks per stage rank, and which virtual stages they are."""

    chunks: int
    placement: Placement


class _Named(NamedTuple):
    """One named schedule: its builder and its shape; the number of chunks of a ``fixed`` schedule cannot be changed."""

    build: Callable[..., list[list[Instruction]]]
    shape: ScheduleShape
    fixed: bool = True


_ONE = ScheduleShape(1, Placement.LOOP)
_VEE = ScheduleShape(2, Placement.VEE)
_TABLE: dict[str, _Named] = {
    "gpipe": _Named(plain.gpipe, _ONE),
    "1f1b": _Named(plain.one_forward_one_backward, _ONE),
    "interleaved": _Named(interleaved.interleaved, ScheduleShape(2, Placement.LOOP), fixed=False),
    "zb-h1": _Named(zero_bubble.zb_h1, _ONE),
    "zb-h2": _Named(zero_bubble.zb_h2, _ONE),
    "zb-v": _Named(vee.zb_v, _VEE),
    "dualpipe-v": _Named(vee.dual_pipe_v, _VEE),
}
SCHEDULES: Sequence[str] = tuple(_TABLE)
"""Names that ``make_schedule`` accepts."""


def schedule_shape(
    schedule: str | UserSchedule, chunks: int | None = None, placement: Placement | str | None = None
) -> ScheduleShape:
    """Chunks per rank and placement of a schedule, before it is built: enough to cut the model.

    Args:
        schedule: A name of :data:`SCHEDULES` or a user's function.
        chunks: Requested number of chunks (``virtual_pipeline_parallel_size``); ``None`` takes the schedule's default.
        placement: For a user's function: placement of the chunks, ``"loop"`` by default.

    Raises:
        ValueError: If the name is unknown or the schedule does not take these numbers.

    Example:
        >>> schedule_shape("1f1b").chunks, schedule_shape("zb-v").chunks, schedule_shape("zb-v").placement.value
        (1, 2, 'vee')
    """
    if chunks is not None and chunks < 1:
        raise ValueError(f"chunks={chunks} (virtual_pipeline_parallel_size) must be at least 1")
    if callable(schedule):
        return ScheduleShape(chunks or 1, Placement(placement or Placement.LOOP))
    named = _lookup(schedule)
    own = named.shape
    if chunks is not None and named.fixed and chunks != own.chunks:
        hint = "; 'interleaved' takes any number" if own.chunks == 1 else ""
        raise ValueError(
            f"schedule {schedule!r} puts {own.chunks} chunk(s) on each stage, got chunks={chunks};"
            f" set virtual_pipeline_parallel_size={own.chunks} or leave it out{hint}"
        )
    if placement is not None and Placement(placement) is not own.placement:
        raise ValueError(
            f"schedule {schedule!r} has placement {own.placement.value!r}, got {Placement(placement).value!r};"
            " leave placement out, it is for schedules of your own"
        )
    return ScheduleShape(chunks or own.chunks, own.placement)


def make_schedule(
    schedule: str | UserSchedule,
    stages: int,
    micro_batches: int,
    *,
    chunks: int | None = None,
    placement: Placement | str | None = None,
    forward_only: bool = False,
    **options: Any,
) -> Schedule:
    """Build a schedule of computations.

    Args:
        schedule: A name of :data:`SCHEDULES`, or a function ``(stages, chunks, micro_batches)`` that returns, per stage
            rank, instructions or their names (``"F0"`` or ``"F0.1"``). The result of a function is checked.
        stages: Number of stage ranks, p.
        micro_batches: Micro-batches per step, m; any number from 1.
        chunks: Model chunks per stage rank, v; ``None`` takes the schedule's default.
        placement: For a user's function: placement of the chunks, ``"loop"`` by default.
        forward_only: Only forwards, for evaluation, with the chunks and placement of the schedule.
        options: Parameters of the named schedule, see the table above.

    Returns:
        The computations of every stage rank, in order, without transfers (see :func:`lower`).

    Raises:
        ScheduleError: If a user's schedule could hang or lacks an instruction.
        ValueError: If the name or an option is unknown, or a number is not valid for the schedule.

    Example:
        >>> [str(step) for step in make_schedule("1f1b", stages=2, micro_batches=2).instructions[0]]
        ['F0.0', 'F1.0', 'B0.0', 'B1.0']
    """
    for name, value in (("stages", stages), ("micro_batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    shape = schedule_shape(schedule, chunks, placement)
    if callable(schedule) and not forward_only:
        _refuse_options(getattr(schedule, "__name__", "of your own"), options, [])
        return from_function(schedule, stages, shape.chunks, micro_batches, shape.placement)
    name = getattr(schedule, "__name__", str(schedule))
    if forward_only:
        lists = _forward_only(stages, shape, micro_batches)
    else:
        named = _lookup(schedule)
        _refuse_options(name, options, _options(named))
        sizes = (stages, micro_batches) if named.fixed else (stages, shape.chunks, micro_batches)
        lists = named.build(*sizes, **options)
    return Schedule(name, stages, shape.chunks, micro_batches, shape.placement, tuple(map(tuple, lists)))


def _forward_only(stages: int, shape: ScheduleShape, micro_batches: int) -> list[list[Instruction]]:
    if shape.placement is Placement.VEE and shape.chunks == 2:
        return vee.forward_only(stages, micro_batches)
    return interleaved.forward_only(stages, shape.chunks, micro_batches)


def _lookup(name: str | UserSchedule) -> _Named:
    if not isinstance(name, str) or name not in _TABLE:
        raise ValueError(
            f"unknown pipeline_schedule={name!r}; use one of {', '.join(_TABLE)} or a function of your own"
        )
    return _TABLE[name]


def _options(named: _Named) -> list[str]:
    parameters = list(inspect.signature(named.build).parameters)
    return parameters[2 if named.fixed else 3 :]


def _refuse_options(name: str, options: dict[str, Any], known: list[str]) -> None:
    unknown = sorted(set(options) - set(known))
    if unknown:
        takes = f"takes {', '.join(known)}" if known else "takes no options"
        raise ValueError(f"schedule {name!r} does not know the option(s) {', '.join(unknown)}; it {takes}")
