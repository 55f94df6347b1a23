"""A timeline as a PNG picture, for programs that cannot show SVG. Needs matplotlib, the extra ``plots``."""

from __future__ import annotations

from typing import Any

from lightning_megatron.mesh.lazy import figure, save_figure
from lightning_megatron.pipeline.pictures.drawing import PALER, colours_of, kinds_in
from lightning_megatron.pipeline.schedules.simulation import Timeline
from lightning_megatron.pipeline.schedules.text import label

_WIDEST = 60.0  # inches
_INCHES_PER_LETTER = 0.09


def png(timeline: Timeline) -> bytes:
    """Draw a timeline as a PNG picture: one row per stage and one bar per instruction over a time axis.

    Args:
        timeline: The timeline to draw.

    Returns:
        The bytes of the file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    return save_figure(draw(timeline), "png")


def draw(timeline: Timeline) -> Any:
    """The ``matplotlib.figure.Figure`` that :func:`png` writes; bars that are too short for their label have none."""
    schedule = timeline.schedule
    bars = [
        (rank, step, start - timeline.start, end - start)
        for rank, steps in enumerate(schedule.instructions)
        for step, start, end in zip(steps, timeline.starts[rank], timeline.ends[rank], strict=True)
    ]
    shortest = min((length for *_, length in bars if length > 0), default=1.0)
    letters = max(len(label(schedule, step)) for _, step, _, _ in bars)
    span = max(timeline.makespan, 1e-12)
    inches = min(_WIDEST, max(5.0, span / shortest * (letters + 1) * _INCHES_PER_LETTER))
    drawn = figure(inches + 1.0, 1.2 + 0.32 * schedule.stages)
    axes = drawn.add_subplot()
    axes.broken_barh([(0, span)], (-0.5, schedule.stages), facecolors="#eeeeee")
    rows: dict[tuple[int, str], list[tuple[float, float]]] = {}  # drawn at once, as a call for each bar takes long
    for rank, step, start, length in bars:
        colour, ink = colours_of(step)
        rows.setdefault((rank, colour), []).append((start, length))
        name = label(schedule, step)
        if length / span * inches >= len(name) * _INCHES_PER_LETTER:
            axes.text(start + length / 2, rank, name, color=ink, fontsize=8, ha="center", va="center")
    for (rank, colour), ranges in rows.items():
        axes.broken_barh(ranges, (rank - 0.45, 0.9), facecolors=colour, edgecolors="white", linewidth=0.5)
    axes.set(xlim=(0, span), ylim=(schedule.stages - 0.5, -0.5), xlabel="time", ylabel="stage")
    axes.set_yticks(range(schedule.stages))
    handles = [axes.broken_barh([], (0, 0), facecolors=colour, label=name) for name, colour in kinds_in(schedule)]
    if schedule.chunks > 1:
        handles.append(axes.broken_barh([], (0, 0), facecolors="none", label=PALER))
    drawn.legend(handles=handles, loc="outside lower right", ncols=len(handles), fontsize=8, frameon=False)
    return drawn
