"""Predicted against measured step times as an SVG picture: one dot per run, one colour per family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lightning_megatron.planner.runs.scoring import Scored

_SIZE, _MARGIN, _LEGEND = 460, 56, 190


def error_svg(scored: Sequence[Scored]) -> str:
    """An SVG document, both axes logarithmic in seconds; the lines are exact, and 20% too slow or too fast."""
    points = [item for item in scored if item.seconds]
    values = [value for item in points for value in (item.seconds or 1.0, item.prediction.iteration_seconds)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    families = list(dict.fromkeys(item.run.family for item in points))
    parts = [_axes(low, high), *(_line(low, high, factor) for factor in (1.0, 1.2, 1 / 1.2))]
    for item in points:
        x, y = _place(item.seconds or 1.0, low, high), _place(item.prediction.iteration_seconds, low, high)
        label = escape(f"{item.run.id}: {100 * (item.error or 0.0):+.0f}%")
        color = _color(families.index(item.run.family), len(families))
        parts.append(f'<circle cx="{x:.1f}" cy="{_SIZE - y:.1f}" r="3" fill="{color}"><title>{label}</title></circle>')
    for index, family in enumerate(families):
        y = _MARGIN + 17 * index
        parts.append(f'<circle cx="{_SIZE + 8}" cy="{y - 4}" r="4" fill="{_color(index, len(families))}"/>')
        parts.append(f'<text x="{_SIZE + 18}" y="{y}">{escape(family)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SIZE + _LEGEND}" height="{_SIZE}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    )


def _place(value: float, low: int, high: int) -> float:
    """Distance of a value from the lower left corner."""
    return _MARGIN + (math.log10(value) - low) / (high - low) * (_SIZE - 2 * _MARGIN)


def _line(low: int, high: int, factor: float) -> str:
    """Where predicted is ``factor`` times measured."""
    ends = (10.0**low, 10.0**high)
    x1, x2 = (_place(end, low, high) for end in ends)
    y1, y2 = (_SIZE - _place(end * factor, low, high) for end in ends)
    dash = "" if factor == 1.0 else ' stroke-dasharray="4"'
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#888"{dash}/>'


def _axes(low: int, high: int) -> str:
    """Axes with powers of ten."""
    parts = [f'<text x="{_SIZE / 2}" y="{_SIZE - 14}" text-anchor="middle">measured seconds per step</text>']
    parts.append(f'<text transform="translate(16,{_SIZE / 2}) rotate(-90)" text-anchor="middle">predicted</text>')
    for power in range(low, high + 1):
        place = _place(10.0**power, low, high)
        parts.append(f'<text x="{place:.1f}" y="{_SIZE - _MARGIN + 18}" text-anchor="middle">{10.0**power:g}</text>')
        parts.append(f'<text x="{_MARGIN - 8}" y="{_SIZE - place + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    left, bottom, end = _MARGIN, _SIZE - _MARGIN, _SIZE - _MARGIN
    parts.append(f'<path d="M{left},{_MARGIN} V{bottom} H{end}" fill="none" stroke="black"/>')
    return "".join(parts)


def _color(index: int, count: int) -> str:
    """A colour of its own for each family."""
    return f"hsl({360 * index // count},65%,{38 + 14 * (index % 3)}%)"
