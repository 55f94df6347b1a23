"""Two tensor-parallel ranks: our step beside Lightning's ModelParallelStrategy with DTensor, our loss beside torch's.

``python -m tests.benchmarks.tensor [--only step,sequence,loss]``. Rounds alternate in one run; nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.benchmarks.contestants import Round
from tests.benchmarks.model import Size
from tests.benchmarks.split_contestants import DUELS, RANKS, duel
from tests.harness import run_job

DEFAULTS = Size(layers=4, hidden=256, heads=8, sequence=128, vocabulary=1024, micro_batches=1, micro_batch=4)


def summary(name: str, ranks: list[list[tuple[Round, Round]]]) -> dict[str, Any]:
    """Ratios round by round, of the slowest rank's wall time and of all ranks' processor time; prints them."""
    report: dict[str, Any] = {}
    for measure, combine in (("seconds", max), ("cpu", sum)):
        own, other = (
            [combine(getattr(rank[index][side], measure) for rank in ranks) for index in range(len(ranks[0]))]
            for side in (0, 1)
        )
        ratios = sorted(one / two for one, two in zip(own, other, strict=True))
        report[measure] = {"ours": own, "theirs": other, "median_ratio": statistics.median(ratios)}
        print(
            f"{name:9s} {measure:8s} ours {statistics.median(own) * 1e3:8.2f} ms   DTensor "
            f"{statistics.median(other) * 1e3:8.2f} ms   ratio {statistics.median(ratios):6.3f} "
            f"({ratios[0]:.3f}..{ratios[-1]:.3f})",
            flush=True,
        )
    losses = [[rank[-1][side].loss for rank in ranks if not math.isnan(rank[-1][side].loss)] for side in (0, 1)]
    print(f"{name:9s} last losses: ours {losses[0]}, DTensor {losses[1]}", flush=True)
    return report


def main() -> None:
    """Measures the duels asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.tensor", description=__doc__)
    parser.add_argument("--only", default=",".join(DUELS), help="comma-separated duels")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", help="write the report to this file")
    for field in fields(Size):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=getattr(DEFAULTS, field.name))
    arguments = parser.parse_args()
    size = Size(**{field.name: getattr(arguments, field.name) for field in fields(Size)})
    report = {}
    for name in arguments.only.split(","):
        outcomes = run_job(duel, RANKS, name, size, arguments.steps, arguments.rounds, deadline=500.0)
        report[name] = summary(name, [outcome.value for outcome in outcomes])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
