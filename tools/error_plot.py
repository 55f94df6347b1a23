"""Predicted against measured step times as a picture: one dot per run, one colour per family."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl

from lightning_megatron.mesh.lazy import figure, save_figure
from lightning_megatron.planner.runs.scoring import Scored


def error_svg(scored: Sequence[Scored]) -> str:
    """An SVG document, both axes logarithmic in seconds; the lines are exact, and 20% too slow or too fast."""
    points = [item for item in scored if item.seconds]
    values = [value for item in points for value in (item.seconds or 1.0, item.prediction.iteration_seconds)]
    ends = (min(values) / 1.3, max(values) * 1.3)
    families = list(dict.fromkeys(item.run.family for item in points))
    drawn = figure(8.5, 5.5)
    axes = drawn.add_subplot()
    for factor, style, name in ((1.0, "-", "exact"), (1.2, "--", "20% off"), (1 / 1.2, "--", None)):
        axes.plot(ends, [end * factor for end in ends], style, color="#888888", linewidth=0.8, label=name)
    colors = mpl.colormaps["turbo"].resampled(max(len(families), 2))
    for index, family in enumerate(families):
        mine = [item for item in points if item.run.family == family]
        times = [item.seconds or 1.0 for item in mine]
        predicted = [item.prediction.iteration_seconds for item in mine]
        axes.scatter(times, predicted, s=12, color=colors(index), label=family)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured seconds per step", ylabel="predicted seconds per step")
    drawn.legend(loc="outside right upper", fontsize=7, frameon=False)
    return save_figure(drawn, "svg").decode()
