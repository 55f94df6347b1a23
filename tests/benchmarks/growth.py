"""How the cost of a step grows with layers, micro-batches and ranks: slopes, beside the peer's.

A ratio at one size hides a cost that grows faster than the work. Here the processor time of a step is taken at one, two
and four times the work, ours and the peer's in turn, and straight lines are laid through them: the slope is what a
further layer, micro-batch or rank costs, the intercept what a step costs whatever it does.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from tests.benchmarks import pieces
from tests.benchmarks.contestants import Round
from tests.benchmarks.model import Size
from tests.harness import RankInfo, run_job

FACTORS = (1, 2, 4)
BASE = Size(layers=4, hidden=64, sequence=32, vocabulary=128, micro_batches=4)
DIMENSIONS = ("layers", "micro-batches", "ranks")


def grow(dimension: str, rounds: int, steps: int) -> dict[str, Any]:
    """Slope and intercept of ours and of torch's 1F1B, in ms of processor time per step, over all ranks.

    Args:
        dimension: one of ``DIMENSIONS``; further ranks are further stages, each with as many layers as the others.
        rounds: of each contestant at each size.
        steps: measured in a round.
    """
    counts, points = [], {"ours": [], "theirs": []}  # type: ignore[var-annotated]
    for factor in FACTORS:
        count, ranks, size = _size(dimension, factor)
        counts.append(count)
        outcomes = [outcome.value for outcome in run_job(_measure, ranks, size, rounds, steps, deadline=900.0)]
        for side, name in enumerate(points):
            points[name].append(min(sum(rank[at][side].cpu for rank in outcomes) for at in range(rounds)) * 1e3)
    found: dict[str, Any] = {"dimension": dimension, "counts": counts, "points_ms": points}
    for name, costs in points.items():
        slope, intercept = statistics.linear_regression(counts, costs)
        found[name] = {"slope_ms": round(slope, 4), "intercept_ms": round(intercept, 3)}
    found["slope_ratio"] = round(found["ours"]["slope_ms"] / found["theirs"]["slope_ms"], 4)
    return found


def _size(dimension: str, factor: int) -> tuple[int, int, Size]:
    """What is counted, the ranks, and the dimensions at ``factor`` times the work."""
    if dimension == "micro-batches":
        return factor * BASE.micro_batches, 2, replace(BASE, micro_batches=factor * BASE.micro_batches)
    layers = factor * BASE.layers
    if dimension == "layers":
        return layers, 2, replace(BASE, layers=layers)
    return 2 * factor, 2 * factor, replace(BASE, layers=layers, micro_batches=2 * BASE.micro_batches)


def _measure(info: RankInfo, size: Size, rounds: int, steps: int) -> list[tuple[Round, Round]]:
    return pieces.duel(info, "1f1b", size, steps, rounds)
