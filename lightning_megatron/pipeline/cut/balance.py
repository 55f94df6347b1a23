"""Which stage gets how many layers.

What a stage does per micro-batch sets the pace of the whole pipeline, and with several chunks per stage that is the sum
of its chunks: where stage 0 has the first and the last piece of the module, as in a V, it has the embedding and the
head, so its pieces should have fewer layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def balance(costs: Sequence[float], owners: Sequence[int], before: float = 0.0, after: float = 0.0) -> list[int]:
    """Contiguous split of layers into non-empty runs, one per virtual stage.

    The slowest stage, over all its runs, is as fast as can be; among equals the largest run is small, then all are
    even. With one run per stage this is exact; otherwise it starts from even runs and moves layers while that helps.

    Args:
        costs: cost per layer.
        owners: stage of each virtual stage.
        before: cost that the first run carries besides its layers.
        after: cost that the last run carries besides its layers.

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
    """Contiguous split of layers into non-empty runs for devices of unequal speed; the slowest run is fastest.

    Args:
        costs: cost per layer.
        speeds: relative speed of each run's device.
        before: cost that the first run carries besides its layers.
        after: cost that the last run carries besides its layers.

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
    """Cost of each run."""
    stops = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    loads = [float(sum(costs[stop - size : stop])) for size, stop in zip(sizes, stops, strict=True)]
    loads[0] += before
    loads[-1] += after
    return loads


def stage_loads(loads: Sequence[float], owners: Sequence[int]) -> list[float]:
    """Sums over the runs of each stage."""
    return [stage_load(loads, owners, stage) for stage in sorted(set(owners))]


def stage_load(loads: Sequence[float], owners: Sequence[int], stage: int) -> float:
    """Sum over the runs of one stage."""
    return sum(load for load, owner in zip(loads, owners, strict=True) if owner == stage)


def _unevenness(
    sizes: Sequence[int], costs: Sequence[float], owners: Sequence[int], before: float, after: float
) -> tuple[float, float, float]:
    loads = run_loads(sizes, costs, before, after)
    stages = stage_loads(loads, owners)
    # Rounded, so that sums in another order do not look like progress.
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
    """The split with the smallest largest run, then the most even."""
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
