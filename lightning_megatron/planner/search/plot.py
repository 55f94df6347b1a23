"""Pictures of a plan as SVG text: throughput against GPUs, and the memory of the best layouts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lightning_megatron.planner.cost.prediction import Prediction
from lightning_megatron.planner.model.cluster import GIB
from lightning_megatron.planner.search.search import Limits, Plan, plan

_COLORS = {
    "weights": "#4477aa",
    "gradients": "#66ccee",
    "optimizer": "#228833",
    "activations": "#ccbb44",
    "buffers": "#bbbbbb",
}
_WIDTH, _HEIGHT, _MARGIN = 460, 280, 56


def plan_svg(found: Plan, limits: Limits | None = None) -> str:
    """An SVG document: left, tokens/s of the best layout on a quarter to four times the GPUs; right, memory by kind."""
    points = scaling(found, limits)
    body = _throughput(points) + f'<g transform="translate({_WIDTH},0)">{_memory(found.ranked[:8])}</g>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _WIDTH}" height="{_HEIGHT + 90}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>{body}</svg>'
    )


def scaling(found: Plan, limits: Limits | None = None) -> list[tuple[int, Prediction]]:
    """The best layout on a quarter, half, once, twice and four times the GPUs, where one fits."""
    points = []
    for numerator, denominator in ((1, 4), (1, 2), (1, 1), (2, 1), (4, 1)):
        gpus, rest = divmod(found.gpus * numerator, denominator)
        if rest or gpus < 1:
            continue
        try:
            best = found.best if gpus == found.gpus else plan(
                found.shape, found.cluster, gpus, found.global_batch, limits=limits, top=1
            ).best  # fmt: skip
        except ValueError:
            continue  # fewer GPUs may not hold the model, more may not divide the batch: the plot has a point less
        points.append((gpus, best))
    return points


def _throughput(points: Sequence[tuple[int, Prediction]]) -> str:
    """Tokens per second against GPUs; the dashed line is the first point's rate per GPU."""
    most_gpus = max(gpus for gpus, _ in points)
    per_gpu = points[0][1].tokens_per_second / points[0][0]
    top = max(per_gpu * most_gpus, max(item.tokens_per_second for _, item in points))
    place = [(_across(gpus / most_gpus), _up(item.tokens_per_second / top)) for gpus, item in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in place)
    parts = [
        _frame("tokens/s against GPUs (dashed: no loss)"),
        f'<line x1="{_across(0):.1f}" y1="{_up(0):.1f}" x2="{_across(1):.1f}" '
        f'y2="{_up(per_gpu * most_gpus / top):.1f}" '
        'stroke="#999" stroke-dasharray="4"/>',
        f'<polyline points="{line}" fill="none" stroke="#4477aa" stroke-width="2"/>',
    ]
    for (x, y), (gpus, item) in zip(place, points, strict=True):
        label = f"{gpus} GPUs: {item.tokens_per_second:,.0f} ({100 * item.mfu:.0f}% MFU) {item.recipe.describe()}"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#4477aa"><title>{escape(label)}</title></circle>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _MARGIN + 16}" text-anchor="middle">{gpus}</text>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y - 7:.1f}" text-anchor="end">{item.tokens_per_second:,.0f}</text>')
    return "".join(parts)


def _memory(ranked: Sequence[Prediction]) -> str:
    """Stacked bars of memory by kind, one per layout, with the capacity as a line."""
    capacity = max(item.capacity for item in ranked)
    top = max(capacity, max(item.memory.total for item in ranked))
    width = (_WIDTH - 2 * _MARGIN) / len(ranked)
    parts = [_frame(f"memory of the fullest rank in GiB (line: {capacity / GIB:.0f})")]
    for index, item in enumerate(ranked):
        x, level = _MARGIN + index * width, 0.0
        for name, color in _COLORS.items():
            size = getattr(item.memory, name) / top
            label = f"{item.recipe.describe()}: {name} {getattr(item.memory, name) / GIB:.1f} GiB"
            parts.append(
                f'<rect x="{x + 2:.1f}" y="{_up(level + size):.1f}" width="{width - 4:.1f}" '
                f'height="{_up(level) - _up(level + size):.1f}" fill="{color}"><title>{escape(label)}</title></rect>'
            )
            level += size
        parts.append(_slanted(x + width / 2, item.recipe.describe().rsplit(" ", 4)[0]))
    y = _up(capacity / top)
    parts.append(f'<line x1="{_MARGIN}" y1="{y:.1f}" x2="{_WIDTH - _MARGIN}" y2="{y:.1f}" stroke="#cc3311"/>')
    for index, (name, color) in enumerate(_COLORS.items()):
        x = _MARGIN + index * 76
        parts.append(f'<rect x="{x}" y="{_HEIGHT + 72}" width="9" height="9" fill="{color}"/>')
        parts.append(f'<text x="{x + 12}" y="{_HEIGHT + 80}">{name}</text>')
    return "".join(parts)


def _slanted(x: float, text: str) -> str:
    """A label under a bar."""
    y = _HEIGHT - _MARGIN + 12
    return f'<text transform="translate({x:.1f},{y}) rotate(40)" font-size="9">{escape(text)}</text>'


def _frame(title: str) -> str:
    """Axes and title."""
    bottom, left = _HEIGHT - _MARGIN, _MARGIN
    return (
        f'<text x="{left}" y="24" font-size="13">{escape(title)}</text>'
        f'<line x1="{left}" y1="{bottom}" x2="{_WIDTH - _MARGIN}" y2="{bottom}" stroke="black"/>'
        f'<line x1="{left}" y1="40" x2="{left}" y2="{bottom}" stroke="black"/>'
    )


def _across(share: float) -> float:
    """Horizontal place of a share of the axis."""
    return _MARGIN + share * (_WIDTH - 2 * _MARGIN)


def _up(share: float) -> float:
    """Vertical place of a share of the axis."""
    return _HEIGHT - _MARGIN - share * (_HEIGHT - _MARGIN - 40)
