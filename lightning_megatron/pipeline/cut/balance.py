"""Balances the layers over the stages.

The slowest stage sets the pace of the whole pipeline. With several chunks per stage, its time per micro-batch is the
sum over its chunks. In a V schedule stage 0 has the first and the last chunk, and with them the embedding and the head,
so its chunks should have fewer layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def balance(costs: Sequence[float], owners: Sequence[int], before: float = 0.0, after: float = 0.0) -> list[int]:
    """Split layers into contiguous non-empty runs, one per virtual stage.

    Minimizes the largest sum over the runs of a stage, then the largest run, then the unevenness of all runs. With one
    run per stage the result is exact; otherwise layers move between even runs as long as that helps.

    Args:
        costs: cost per layer.
        owners: stage of each virtual stage.
        before: cost of the first run besides its layers.
        after: cost of the last run besides its layers.

    Returns:
        Layers per virtual stage.
    """
    sizes = _even_runs(costs, len(owners), before, after)
    if len(set(owners)) == len(owners):
        return sizes
    best = _unevenness(sizes, costs, owners, before, after)
    while True:
        loads = run_loads(sizes, costs, before, after)
        slowest = max(stage_loads(loads, owners))
        sources = [
            at
            for at, (load, owner) in enumerate(zip(loads, owners, strict=True))
            if sizes[at] > 1 and (load == max(loads) or stage_load(loads, owners, owner) == slowest)
        ]
        moves = [
            _moved(sizes, source, target) for source in sources for target in range(len(sizes)) if source != target
        ]
        moved = min(moves, key=lambda move: _unevenness(move, costs, owners, before, after), default=sizes)
        score = _unevenness(moved, costs, owners, before, after)
        if score >= best:
            return sizes
        sizes, best = moved, score


def balance_unequal(
    costs: Sequence[float], speeds: Sequence[float], before: float = 0.0, after: float = 0.0
) -> list[int]:
    """Split layers into contiguous non-empty runs for devices of unequal speed; minimizes the time of the slowest run.

    Args:
        costs: cost per layer.
        speeds: relative speed of each run's device.
        before: cost of the first run besides its layers.
        after: cost of the last run besides its layers.

    Returns:
        Layers per run: [3, 1] for four equal layers on speeds [3.0, 1.0].
    """
    layers, runs = len(costs), len(speeds)
    sums = list(itertools.accumulate(costs, initial=0.0))
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for run, speed in enumerate(speeds):
        extra = (before if run == 0 else 0.0) + (after if run == runs - 1 else 0.0)
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for stop in range(run + 1, layers - (runs - 1 - run) + 1):
            options = [
                (max(seconds, (sums[stop] - sums[start] + extra) / speed), (*sizes, stop - start))
                for start, (seconds, sizes) in best.items()
                if start < stop
            ]
            following[stop] = min(options)
        best = following
    return list(best[layers][1])


def run_loads(sizes: Sequence[int], costs: Sequence[float], before: float, after: float) -> list[float]:
    """Cost of each run; ``before`` and ``after`` are added to the first and the last."""
    stops = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    loads = [float(sum(costs[stop - size : stop])) for size, stop in zip(sizes, stops, strict=True)]
    loads[0] += before
    loads[-1] += after
    return loads


def stage_loads(loads: Sequence[float], owners: Sequence[int]) -> list[float]:
    """Cost of each stage, summed over its runs."""
    return [stage_load(loads, owners, stage) for stage in sorted(set(owners))]


def stage_load(loads: Sequence[float], owners: Sequence[int], stage: int) -> float:
    """Cost of one stage, summed over its runs."""
    return sum(load for load, owner in zip(loads, owners, strict=True) if owner == stage)


def _unevenness(
    sizes: Sequence[int], costs: Sequence[float], owners: Sequence[int], before: float, after: float
) -> tuple[float, float, float]:
    loads = run_loads(sizes, costs, before, after)
    stages = stage_loads(loads, owners)
    # Rounded, as sums in another order differ in their last bits, which must not count as an improvement.
    scale = 1e9 / max(sum(loads), 1e-300)
    largest = (round(max(stages) * scale), round(max(loads) * scale))
    return (*largest, round(sum(load * load for load in loads) * scale * scale / 1e9))


def _moved(sizes: Sequence[int], source: int, target: int) -> list[int]:
    """The split with one layer less in one run and one more in another."""
    moved = list(sizes)
    moved[source] -= 1
    moved[target] += 1
    return moved


def _even_runs(costs: Sequence[float], stages: int, before: float, after: float) -> list[int]:
    """Layers per run: the split with the smallest largest run, among these the most even one (dynamic programming)."""
    n = len(costs)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def load(stage: int, start: int, stop: int) -> float:
        extra = (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)
        return prefix[stop] - prefix[start] + extra

    infinite = (float("inf"), float("inf"))
    best = [(0.0, 0.0) if stop == 0 else infinite for stop in range(n + 1)]
    cuts: list[list[int]] = []
    for stage in range(stages):
        row, cut = [infinite] * (n + 1), [0] * (n + 1)
        for stop in range(stage + 1, n - (stages - 1 - stage) + 1):
            for start in range(stage, stop):
                if best[start] == infinite:
                    continue
                weight = load(stage, start, stop)
                candidate = (max(best[start][0], weight), best[start][1] + weight * weight)
                if candidate < row[stop]:
                    row[stop], cut[stop] = candidate, start
        best = row
        cuts.append(cut)
    sizes, stop = [], n
    for cut in reversed(cuts):
        sizes.append(stop - cut[stop])
        stop = cut[stop]
    return sizes[::-1]
