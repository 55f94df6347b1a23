"""Plots of a plan: throughput over GPUs, and memory of the best layouts. Needs matplotlib (extra ``plots``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_megatron.mesh.lazy import figure, save_figure
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


def plan_svg(found: Plan, limits: Limits | None = None) -> str:
    """Plot a plan as an SVG document.

    Left: tokens/s of the best layout on a quarter to four times the GPUs. Right: memory by kind of the best 8 layouts.

    Args:
        found: the plan.
        limits: of the search on other numbers of GPUs.

    Raises:
        ImportError: matplotlib is not installed.
    """
    drawn = figure(11.0, 4.8)
    left, right = drawn.subplots(1, 2)
    _throughput(left, scaling(found, limits))
    _memory(right, found.ranked[:8])
    return save_figure(drawn, "svg").decode()


def scaling(found: Plan, limits: Limits | None = None) -> list[tuple[int, Prediction]]:
    """(GPUs, best layout) on a quarter, half, once, twice and four times the GPUs; without those that fit no layout."""
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
            continue  # the model does not fit on so few GPUs, or the batch does not divide over so many
        points.append((gpus, best))
    return points


def _throughput(axes: Any, points: Sequence[tuple[int, Prediction]]) -> None:
    """Plot tokens per second over GPUs; the dashed line scales the first point linearly."""
    gpus = [count for count, _ in points]
    rates = [item.tokens_per_second for _, item in points]
    axes.plot([0, gpus[-1]], [0, rates[0] / gpus[0] * gpus[-1]], "--", color="#999999", label="no loss")
    axes.plot(gpus, rates, "o-", color=_COLORS["weights"], label="best layout")
    for count, item in points:
        text = f"{count} GPUs: {item.tokens_per_second:,.0f} ({100 * item.mfu:.0f}% MFU)"
        axes.annotate(text, (count, item.tokens_per_second), (6, -10), textcoords="offset points", fontsize=7)
    axes.set(xlabel="GPUs", ylabel="tokens/s", title="Throughput of the best layout", xlim=(0, 1.5 * gpus[-1]))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _memory(axes: Any, ranked: Sequence[Prediction]) -> None:
    """Plot stacked bars of memory by kind, one per layout, and a line for the capacity."""
    names = [f"{rank}. {item.recipe.sizes()}" for rank, item in enumerate(ranked, start=1)]
    below = [0.0] * len(ranked)
    for kind, color in _COLORS.items():
        sizes = [getattr(item.memory, kind) / GIB for item in ranked]
        axes.bar(names, sizes, bottom=below, color=color, label=kind)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    axes.axhline(max(item.capacity for item in ranked) / GIB, color="#cc3311", label="capacity")
    axes.set(ylabel="GiB", title="Memory of the fullest rank")
    axes.tick_params(axis="x", labelrotation=40, labelsize=7)
    axes.set_xticks(range(len(names)), names, ha="right", rotation=40)
    axes.set_ylim(top=1.3 * max(max(below), *(item.capacity / GIB for item in ranked)))  # room for the legend
    axes.legend(fontsize=8, loc="upper center", ncols=3)
