"""Pictures of schedules: a text grid, an SVG, and a trace for chrome://tracing or Perfetto.

Docs and tests show schedules as text grids, with one row per stage and one column per unit of time::

    stage 0  F0 F1 .. .. B0 B1
    stage 1  .. F0 B0 F1 B1 ..
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import Any

from lightning_megatron.pipeline.schedules.instructions import Instruction, Kind, Schedule
from lightning_megatron.pipeline.schedules.simulation import Timeline
from lightning_megatron.pipeline.schedules.text import CONTINUED, IDLE, counted, label, table

# Colours by kind, one per chunk from dark to light; with more chunks they repeat.
_COLOURS = {
    Kind.FORWARD: ("#2f6db5", "#6fa3dc", "#a9cbee", "#d3e4f7"),
    Kind.BACKWARD: ("#2b8a6b", "#63b598", "#a0d5c1", "#cfeae0"),
    Kind.BACKWARD_INPUT: ("#2b8a6b", "#63b598", "#a0d5c1", "#cfeae0"),
    Kind.BACKWARD_WEIGHT: ("#c9822b", "#e0aa68", "#efcfa5", "#f7e6d0"),
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input half of a backward (I)",
    Kind.BACKWARD_WEIGHT: "weight half of a backward (W)",
}
PALER = "paler: later chunks"
_LETTER = 6.2  # pixels, of the labels


def text_grid(timeline: Timeline, unit: float | None = None) -> str:
    """Draw a timeline as text: ``..`` is idle time, ``--`` continues the instruction on its left.

    Args:
        timeline: The timeline to draw.
        unit: Time per column; by default that of the shortest instruction. Times are rounded to columns.

    Returns:
        One line per stage.
    """
    spans = [end - start for starts, ends in _rows(timeline) for start, end in zip(starts, ends, strict=True)]
    unit = unit or min((span for span in spans if span > 0), default=1.0)
    rows = []
    for steps, (starts, ends) in zip(timeline.schedule.instructions, _rows(timeline), strict=True):
        cells: list[str] = []
        for step, start, end in zip(steps, starts, ends, strict=True):
            cells += [IDLE] * (round((start - timeline.start) / unit) - len(cells))
            cells += [label(timeline.schedule, step)] + [CONTINUED] * (round((end - start) / unit) - 1)
        rows.append(cells)
    longest = max(len(cells) for cells in rows)
    return table([cells + [IDLE] * (longest - len(cells)) for cells in rows])


def svg(timeline: Timeline, unit: str = "") -> str:
    """Draw a timeline as an SVG picture with a time axis; tooltips show the times of instructions.

    Args:
        timeline: The timeline to draw.
        unit: Of its times, such as ``s``; none for costs that are relative to each other.

    Returns:
        The SVG document.
    """
    schedule = timeline.schedule
    shortest = _unit(timeline)
    scale = min(28.0 / shortest, 16000.0 / max(timeline.makespan, shortest))
    left, top, height = 70, 48, 22
    width = left + timeline.makespan * scale + 20
    bottom = top + height * schedule.stages
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 560):.0f}" height="{bottom + 70}"'
        ' font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="18" font-size="14">{escape(title(timeline, unit))}</text>',
    ]
    for rank in range(schedule.stages):
        y = top + height * rank
        parts.append(f'<text x="10" y="{y + 15}">stage {rank}</text>')
        long = timeline.makespan * scale
        parts.append(f'<rect x="{left}" y="{y + 1}" width="{long:.2f}" height="{height - 2}" fill="#eeeeee"/>')
    for rank, step, start, end in _bars(timeline):
        x, wide = left + (start - timeline.start) * scale, (end - start) * scale
        parts.append(_bar(label(schedule, step), step, x, top + height * rank, wide, height, start, end))
    parts += _axis(timeline, left, bottom, scale)
    name = f"time ({unit})" if unit else "time"
    parts.append(f'<text x="{left}" y="{bottom + 33}" fill="#666666">{escape(name)}</text>')
    parts += _legend(timeline, left, bottom + 56)
    return "\n".join([*parts, "</svg>"]) + "\n"


def chrome_trace(timeline: Timeline, microseconds: float = 1000.0) -> dict[str, Any]:
    """A timeline in the trace-event format that chrome://tracing and Perfetto read.

    Args:
        timeline: The timeline to draw.
        microseconds: Length of one unit of time of the timeline; with 1000, a unit is shown as a millisecond.

    Returns:
        A dictionary to write as JSON: one complete event per instruction, one thread per stage.
    """
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title(timeline)}}]
    for rank in range(timeline.schedule.stages):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"stage {rank}"}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": rank, "args": {"sort_index": rank}})
    for rank, step, start, end in _bars(timeline):
        events.append(
            {
                "name": label(timeline.schedule, step),
                "cat": step.kind.name.lower(),
                "ph": "X",
                "ts": start * microseconds,
                "dur": (end - start) * microseconds,
                "pid": 0,
                "tid": rank,
                "args": {"kind": step.kind.value, "micro_batch": step.micro_batch, "chunk": step.chunk},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def title(timeline: Timeline, unit: str = "") -> str:
    """One line that names a timeline and its figures, the time with its unit."""
    schedule = timeline.schedule
    chunks = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    return (
        f"{schedule.name}: {counted(schedule.stages, 'stage')}{chunks},"
        f" {counted(schedule.micro_batches, 'micro-batch')}, makespan {f'{timeline.makespan:.5g} {unit}'.strip()},"
        f" bubble {timeline.bubble_fraction:.1%}"
    )


def _unit(timeline: Timeline) -> float:
    """The shortest of the usual bars: one that was measured as far shorter must not stretch the picture."""
    spans = sorted(end - start for _, _, start, end in _bars(timeline) if end > start)
    usual = spans[len(spans) // 2] / 3 if spans else 0.0  # a backward takes twice a forward
    return min((span for span in spans if span >= usual), default=1.0)


def _rows(timeline: Timeline) -> Iterator[tuple[tuple[float, ...], tuple[float, ...]]]:
    return zip(timeline.starts, timeline.ends, strict=True)


def _bars(timeline: Timeline) -> Iterator[tuple[int, Instruction, float, float]]:
    """Rank, instruction, start and end of every computation."""
    for rank, steps in enumerate(timeline.schedule.instructions):
        for step, start, end in zip(steps, timeline.starts[rank], timeline.ends[rank], strict=True):
            yield rank, step, start, end


def _bar(name: str, step: Instruction, x: float, y: int, wide: float, height: int, start: float, end: float) -> str:
    colour, ink = colours_of(step)
    bar = (
        f'<rect x="{x:.2f}" y="{y + 1}" width="{max(wide, 0.3):.2f}" height="{height - 2}" fill="{colour}"'
        f' stroke="white" stroke-width="0.6"><title>{name}: {start:g} to {end:g}</title></rect>'
    )
    if wide < _LETTER * len(name):
        return bar
    return f'{bar}<text x="{x + wide / 2:.2f}" y="{y + 15}" text-anchor="middle" fill="{ink}">{name}</text>'


def kinds_in(schedule: Schedule) -> list[tuple[str, str]]:
    """For legends: name and first colour of each kind of instruction that a schedule has, once per colour."""
    there = {step.kind for steps in schedule.instructions for step in steps}
    if Kind.BACKWARD in there and Kind.BACKWARD_INPUT in there:
        there.remove(Kind.BACKWARD_INPUT)
        return [(name if kind is not Kind.BACKWARD else f"{name} (B) or its input half (I)", _COLOURS[kind][0])
                for kind, name in _NAMES.items() if kind in there]  # fmt: skip
    return [(name, _COLOURS[kind][0]) for kind, name in _NAMES.items() if kind in there]


def colours_of(step: Instruction) -> tuple[str, str]:
    """Colour of an instruction's bar, and of the letters on it."""
    colours = _COLOURS[step.kind]
    chosen = step.chunk % len(colours)
    return colours[chosen], "#000000" if chosen else "#ffffff"


def _axis(timeline: Timeline, left: int, bottom: int, scale: float) -> list[str]:
    parts = []
    for time in ticks(timeline.makespan, scale):
        x = left + time * scale
        shown = f"{timeline.start + time:g}"
        parts.append(f'<line x1="{x:.2f}" y1="{bottom}" x2="{x:.2f}" y2="{bottom + 4}" stroke="#666666"/>')
        parts.append(f'<text x="{x:.2f}" y="{bottom + 16}" text-anchor="middle" fill="#666666">{shown}</text>')
    return parts


def ticks(length: float, scale: float) -> list[float]:
    """Round times from 0 to ``length`` whose labels do not touch.

    Args:
        length: of the axis, in units of time.
        scale: pixels of a unit of time.
    """
    if length <= 0:
        return [0.0]
    decade = 10.0 ** (math.floor(math.log10(length)) - 2)
    steps = [factor * decade * 10**power for power in range(4) for factor in (1, 2, 5)]
    for step in steps:
        times = [round(number * step, 12) for number in range(math.floor(length / step * (1 + 1e-9)) + 1)]
        widest = max(len(f"{time:g}") for time in times)
        if len(times) <= 200 and step * scale >= _LETTER * (widest + 2):
            return times
    return [0.0]


def _legend(timeline: Timeline, left: int, y: int) -> list[str]:
    parts = []
    x = float(left)
    for name, colour in kinds_in(timeline.schedule):
        parts.append(f'<rect x="{x:.0f}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="{y}">{name}</text>')
        x += 17 + _LETTER * len(name) + 20
    if timeline.schedule.chunks > 1:
        parts.append(f'<text x="{x:.0f}" y="{y}">{PALER}</text>')
    return parts
