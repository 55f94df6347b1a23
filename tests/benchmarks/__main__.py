"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import lightning
import torch

from tests.benchmarks.contestants import PAIRS, WARM_UP, Round, duel
from tests.benchmarks.model import Size
from tests.harness import run_job


def main() -> None:
    """Runs the duels that were asked for and prints their ratios."""
    arguments = _parse()
    size = Size(**{field.name: getattr(arguments, field.name) for field in fields(Size)})
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread per rank",
        "size": asdict(size),
        "steps": arguments.steps,
        "warm_up": WARM_UP,
        "rounds": arguments.rounds,
        "duels": {},
    }
    print(json.dumps({key: value for key, value in report.items() if key != "duels"}))
    for name in arguments.only.split(","):
        outcomes = run_job(duel, 2, name, size, arguments.steps, arguments.rounds, deadline=arguments.deadline)
        report["duels"][name] = _summary(name, [outcome.value for outcome in outcomes])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")


def _summary(name: str, ranks: list[list[tuple[Round, Round]]]) -> dict[str, Any]:
    """Ratios round by round, of the slowest rank's wall time and of all ranks' processor time; prints them."""
    report: dict[str, Any] = {}
    for measure, combine in (("seconds", max), ("cpu", sum)):
        sides = [
            [combine(getattr(rank[index][side], measure) for rank in ranks) for index in range(len(ranks[0]))]
            for side in (0, 1)
        ]
        ratios = sorted(one / other for one, other in zip(*sides, strict=True))
        for contestant, values in zip(PAIRS[name], sides, strict=True):
            spread = f"{min(values) * 1e3:.1f}..{max(values) * 1e3:.1f}"
            print(
                f"{name}  {measure:7s} {contestant.__name__:16s} {statistics.median(values) * 1e3:8.1f} ms ({spread})"
            )
        print(
            f"{name}  {measure:7s} ours / theirs    {statistics.median(ratios):8.3f} "
            f"(rounds {ratios[0]:.3f}..{ratios[-1]:.3f}; best of each {min(sides[0]) / min(sides[1]):.3f})"
        )
        report[measure] = {"ours": sides[0], "theirs": sides[1], "median_ratio": statistics.median(ratios)}
    losses = [[rank[-1][side].loss for rank in ranks if not math.isnan(rank[-1][side].loss)] for side in (0, 1)]
    print(f"{name}  last losses: ours {losses[0]}, theirs {losses[1]}")
    return report


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--only", default=",".join(PAIRS), help=f"comma-separated, of {', '.join(PAIRS)}")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each contestant, alternating")
    parser.add_argument("--steps", type=int, default=10, help="measured steps in a round")
    parser.add_argument("--json", help="write the full report to this file")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds for one duel")
    for field in fields(Size):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
