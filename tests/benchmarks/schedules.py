"""Measured step times of every schedule on sleeping stages, beside the simulator's and those of torch's classes.

``python -m tests.benchmarks.schedules [--only zb-v] [--json FILE]``; nothing here is asserted.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.sleeping import PEERS, SCHEDULES, Sleeps, ours, simulated, theirs
from tests.harness import run_job


def measure(schedule: str, sleeps: Sleeps) -> dict[str, Any]:
    """One row: seconds per step, the best of the measured ones, of the slowest rank."""
    outcomes = run_job(ours, sleeps.stages, schedule, sleeps, deadline=300.0)
    row: dict[str, Any] = {
        "schedule": schedule,
        "simulated": simulated(schedule, sleeps),
        "measured": min(outcomes[0].value[1]),
        "step": min(max(times) for times in zip(*(outcome.value[0] for outcome in outcomes), strict=True)),
    }
    if schedule in PEERS:
        outcomes = run_job(theirs, sleeps.stages, schedule, sleeps, deadline=300.0)
        row["torch_step"] = min(max(times) for times in zip(*(outcome.value for outcome in outcomes), strict=True))
    return row


def main() -> None:
    """Measures the schedules asked for and prints a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.schedules", description=__doc__)
    parser.add_argument("--only", default=",".join(SCHEDULES), help="comma-separated schedules")
    parser.add_argument("--steps", type=int, default=Sleeps.steps)
    parser.add_argument("--unit", type=float, default=Sleeps.forward, help="seconds of each third of a stage's work")
    parser.add_argument("--json", help="write the rows to this file")
    arguments = parser.parse_args()
    unit = arguments.unit
    sleeps = Sleeps(forward=unit, backward_input=unit, backward_weight=unit, steps=arguments.steps)
    rows = []
    print("schedule       simulated  measured        step   torch's class")
    for schedule in arguments.only.split(","):
        row = measure(schedule, sleeps)
        rows.append(row)
        peer = f"{row['torch_step']:8.3f} s" if "torch_step" in row else ""
        over = row["measured"] / row["simulated"] - 1
        measured = f"{row['measured']:7.3f} s ({over:+.1%})"
        print(f"{schedule:14s} {row['simulated']:7.3f} s {measured} {row['step']:7.3f} s {peer}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"sleeps": asdict(sleeps), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
