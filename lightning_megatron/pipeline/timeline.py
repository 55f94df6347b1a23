"""Public names for timelines: check a schedule, simulate it with costs, and draw the result."""

from lightning_megatron.pipeline.pictures.drawing import chrome_trace, svg, text_grid, title
from lightning_megatron.pipeline.pictures.image import png
from lightning_megatron.pipeline.schedules.check import Fault, ScheduleError, activations_in_flight, check
from lightning_megatron.pipeline.schedules.dependencies import Costs
from lightning_megatron.pipeline.schedules.simulation import Timeline, simulate
from lightning_megatron.pipeline.schedules.text import list_grid

__all__ = [
    "Costs",
    "Fault",
    "ScheduleError",
    "Timeline",
    "activations_in_flight",
    "check",
    "chrome_trace",
    "list_grid",
    "png",
    "simulate",
    "svg",
    "text_grid",
    "title",
]
