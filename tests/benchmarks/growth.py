"""How the cost of a step grows with layers, micro-batches and ranks: slopes, beside the peer's.

A ratio at one size hides a cost that grows faster than the work. Here the processor time of a step is taken at one, two
and four times the work, ours and the peer's in turn, and straight lines are laid through them: the slope is what a
further layer, micro-batch or rank costs, the intercept what a step costs whatever it does.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from tests.benchmarks import contestants
from tests.benchmarks.contestants import Round
from tests.benchmarks.model import Size
from tests.harness import RankInfo, run_job

FACTORS = (1, 2, 4)
BASE = Size(layers=4, hidden=64, sequence=32, vocabulary=128, micro_batches=4)
DIMENSIONS = {"layers": "layers", "micro-batches": "micro_batches"}


def grow(dimension: str, pair: str, rounds: int, steps: int) -> dict[str, Any]:
    """Slope and intercept of ours and of the peer's, in ms of processor time per step, over all ranks.

    Args:
        dimension: a key of ``DIMENSIONS``.
        pair: a key of ``contestants.PAIRS``.
        rounds: of each contestant at each size.
        steps: measured in a round.
    """
    field = DIMENSIONS[dimension]
    sizes = [replace(BASE, **{field: factor * getattr(BASE, field)}) for factor in FACTORS]
    ranks = [outcome.value for outcome in run_job(_measure, 2, pair, sizes, rounds, steps, deadline=900.0)]
    points: dict[str, list[float]] = {"ours": [], "theirs": []}
    for at in range(len(sizes)):
        for side, name in enumerate(points):
            costs = [sum(rank[at][index][side].cpu for rank in ranks) for index in range(rounds)]
            points[name].append(min(costs) * 1e3)
    counts = [getattr(size, field) for size in sizes]
    found: dict[str, Any] = {"dimension": dimension, "pair": pair, "counts": counts, "points_ms": points}
    for name, costs in points.items():
        slope, intercept = statistics.linear_regression(counts, costs)
        found[name] = {"slope_ms": round(slope, 4), "intercept_ms": round(intercept, 3)}
    found["slope_ratio"] = round(found["ours"]["slope_ms"] / found["theirs"]["slope_ms"], 4)
    return found


def _measure(info: RankInfo, pair: str, sizes: list[Size], rounds: int, steps: int) -> list[list[tuple[Round, Round]]]:
    return [contestants.duel(info, pair, size, steps, rounds) for size in sizes]
