"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import json
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
    """Ratios of the slowest rank's step times, round by round; prints one line per contestant."""
    ours = [max(rank[index][0].seconds for rank in ranks) for index in range(len(ranks[0]))]
    theirs = [max(rank[index][1].seconds for rank in ranks) for index in range(len(ranks[0]))]
    ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    for contestant, seconds in zip(PAIRS[name], (ours, theirs), strict=True):
        spread = f"{min(seconds) * 1e3:.1f}..{max(seconds) * 1e3:.1f}"
        print(f"{name}  {contestant.__name__:16s} {statistics.median(seconds) * 1e3:8.1f} ms per step ({spread})")
    known = [
        [rank[-1][which].loss for rank in ranks if rank[-1][which].loss == rank[-1][which].loss] for which in (0, 1)
    ]
    print(f"{name}  last losses {known}")
    print(f"{name}  ours / theirs    {statistics.median(ratios):8.3f} (rounds {ratios[0]:.3f}..{ratios[-1]:.3f})")
    return {"ours_s": ours, "theirs_s": theirs, "ratios": ratios, "median_ratio": statistics.median(ratios)}


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
