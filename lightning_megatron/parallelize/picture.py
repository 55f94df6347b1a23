"""The plan of a module as a picture: each weight with its parts, and what is sent before and after it.

Needs matplotlib (extra ``plots``).
"""

from __future__ import annotations

from typing import Any

from lightning_megatron.mesh.lazy import figure, save_figure
from lightning_megatron.parallelize.plan.row import ModuleRow
from lightning_megatron.parallelize.report import ParallelReport

_RANKS = ("#2f6db5", "#a9cbee")  # in turns
_WHOLE = "#d8dde6"
_WIDE, _HIGH = 2.0, 0.8  # of a weight, where a row has height 1
MOST_ROWS = 60


def plan_picture(report: ParallelReport, every_layer: bool = False) -> str:
    """Draw a plan as an SVG document.

    Weights are drawn as matrices that inputs enter from the left side, one row per input feature, and outputs leave
    at the bottom, one column per output feature: ``colwise`` cuts columns, ``rowwise`` rows. Beside each stand the
    collectives of its forward and its backward.

    Args:
        report: of ``explain`` or ``parallelize``.
        every_layer: whether to draw numbered layers one by one, instead of once.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = report.grouped(every_layer)
    left = 0.6 + 0.095 * max((len(_titled(row, count)) for row, count in rows), default=0)
    drawn = figure(0.88 * (left + 7.8), 1.4 + 0.42 * min(len(rows), MOST_ROWS))
    axes = drawn.add_subplot()
    axes.axis("off")
    heads = [(-0.15, "right", "module"), (_WIDE / 2, "center", "weight by rank"), (2.3, "left", "style")]
    heads += [(4.6, "left", "forward"), (6.2, "left", "backward")]
    for x, side, text in heads:
        axes.text(x, 0.9, text, ha=side, va="center", fontsize=9, fontweight="bold")
    for place, (row, count) in enumerate(rows[:MOST_ROWS]):
        _draw_row(axes, row, count, -float(place), report.tensor_parallel_size)
    if len(rows) > MOST_ROWS:
        axes.text(0, -MOST_ROWS, f"and {len(rows) - MOST_ROWS} more", va="center", fontsize=8)
    axes.set(xlim=(-left, 7.8), ylim=(-min(len(rows), MOST_ROWS + 1), 1.4))
    ranks = f"{report.tensor_parallel_size} ranks"
    axes.set_title(
        f"Tensor-parallel plan ({report.source}), {ranks}: a shade of blue is one rank's part, grey is whole"
    )
    axes.title.set_fontsize(10)
    return save_figure(drawn, "svg").decode()


def _draw_row(axes: Any, row: ModuleRow, count: int, y: float, ranks: int) -> None:
    """One module: name, weight cut into parts, style and collectives."""
    shape = "×".join(map(str, row.global_shape or ()))
    axes.text(-0.15, y + 0.12, _titled(row, count), ha="right", va="center", fontsize=8)
    axes.text(-0.15, y - 0.22, shape, ha="right", va="center", fontsize=6.5, color="#666666")
    for left, below, wide, high, colour in weight_parts(row, ranks):
        bounds = (left * _WIDE, wide * _WIDE), (y - _HIGH / 2 + below * _HIGH, high * _HIGH)
        axes.broken_barh([bounds[0]], bounds[1], facecolors=colour, edgecolors="white", linewidth=0.8)
    for x, text in ((2.3, row.style), (4.6, row.forward or "–"), (6.2, row.backward or "–")):
        axes.text(x, y, text, ha="left", va="center", fontsize=8)


def _titled(row: ModuleRow, count: int) -> str:
    return f"{row.name} × {count}" if count > 1 else row.name


def weight_parts(row: ModuleRow, ranks: int) -> list[tuple[float, float, float, float, str]]:
    """Left, bottom, width, height (in a square of 1) and colour of each rank's part of a weight.

    A linear keeps its weight as [outputs, inputs] and is drawn with outputs from left to right; an embedding as
    [entries, outputs], drawn with entries from top to bottom. A weight that no rank shares is one grey square.
    """
    whole, part = row.global_shape, row.local_shape
    split = next((dim for dim, size in enumerate(whole or ()) if part and part[dim] < size), None)
    if split is None:
        return [(0.0, 0.0, 1.0, 1.0, _WHOLE)]
    by_columns = (split == 0) != row.style.startswith("embedding")
    size = 1.0 / ranks
    colours = [_RANKS[rank % len(_RANKS)] for rank in range(ranks)]
    if by_columns:
        return [(rank * size, 0.0, size, 1.0, colour) for rank, colour in enumerate(colours)]
    return [(0.0, 1 - (rank + 1) * size, 1.0, size, colour) for rank, colour in enumerate(colours)]
