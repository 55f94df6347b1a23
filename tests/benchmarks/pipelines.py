"""Each schedule on a small GPT, beside the class of ``torch.distributed.pipelining`` for it, in one run.

``python -m tests.benchmarks.pipelines [--only zb-v] [--json FILE]``; nothing here is asserted.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.benchmarks.model import Size
from tests.benchmarks.pieces import PEERS, STAGES, duel
from tests.harness import run_job


def compare(name: str, size: Size, steps: int, rounds: int) -> dict[str, Any]:
    """Times per step of the slowest rank (wall) and of all ranks (processor), round by round, and median ratios."""
    ranks = [outcome.value for outcome in run_job(duel, STAGES, name, size, steps, rounds, deadline=500.0)]
    row: dict[str, Any] = {"schedule": name}
    for measure, combine in (("seconds", max), ("cpu", sum)):
        own, other = (
            [combine(getattr(rank[index][side], measure) for rank in ranks) for index in range(rounds)]
            for side in (0, 1)
        )
        ratios = [one / two for one, two in zip(own, other, strict=True)]
        row[measure] = {"ours": own, "torch": other, "median_ratio": statistics.median(ratios)}
    row["losses"] = [[rank[-1][side].loss for rank in ranks] for side in (0, 1)]
    return row


def main() -> None:
    """Measures the schedules asked for and prints a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pipelines", description=__doc__)
    parser.add_argument("--only", default=",".join(PEERS), help="comma-separated schedules")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", help="write the rows to this file")
    for field in fields(Size):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    arguments = parser.parse_args()
    size = Size(**{field.name: getattr(arguments, field.name) for field in fields(Size)})
    rows = []
    print("schedule      wall: ours, torch's, ratio      processor: ours, torch's, ratio      last losses")
    for name in arguments.only.split(","):
        row = compare(name, size, arguments.steps, arguments.rounds)
        rows.append(row)
        cells = [
            f"{statistics.median(row[measure][side]) * 1e3:7.1f} ms"
            for measure in ("seconds", "cpu")
            for side in ("ours", "torch")
        ]
        wall, cpu = row["seconds"]["median_ratio"], row["cpu"]["median_ratio"]
        print(
            f"{name:12s} {cells[0]} {cells[1]} {wall:6.3f}  {cells[2]} {cells[3]} {cpu:6.3f}  {row['losses']}",
            flush=True,
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
