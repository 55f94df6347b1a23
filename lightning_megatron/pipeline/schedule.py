"""Public names for schedules: build one by name, read its instructions, add sends and receives (lowering)."""

from lightning_megatron.pipeline.schedules.by_name import SCHEDULES, ScheduleShape, make_schedule, schedule_shape
from lightning_megatron.pipeline.schedules.custom import UserSchedule
from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind, Placement, Schedule
from lightning_megatron.pipeline.schedules.lowering import halve_backwards, join_halves, lower

__all__ = [
    "SCHEDULES",
    "Instruction",
    "Kind",
    "Placement",
    "Schedule",
    "ScheduleShape",
    "UserSchedule",
    "halve_backwards",
    "join_halves",
    "lower",
    "make_schedule",
    "schedule_shape",
]
