"""Regressions without a stopwatch: how many calls a step makes, Python's and C's, by rank.

Times move with the machine; the number of function calls in a step of the small GPT does not, and what creeps into a
path that runs per micro-batch, per layer or per parameter shows in it at once. ``counts.json`` holds the recorded ones.

``python -m tests.benchmarks.counts`` counts again and exits with 1 if a path makes over 2% more calls than recorded;
``--record`` writes the new ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.counting import count
from tests.harness import run_job

RECORD = Path(__file__).parent / "counts.json"
TOLERANCE = 0.02
PATHS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "micro-batches": (1, {"micro_batch_size": 1}),
    "dp2": (2, {"data_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2, "micro_batch_size": 1}),
    "pp2-interleaved": (2, {"pipeline_parallel_size": 2, "micro_batch_size": 1, "pipeline_schedule": "interleaved"}),
    "tp2": (2, {"tensor_parallel_size": 2}),
}


def measure(name: str) -> list[float]:
    """Calls per step of one path, per rank."""
    ranks, arguments = PATHS[name]
    return [outcome.value for outcome in run_job(count, ranks, arguments, deadline=200.0)]


def main() -> int:
    """Counts, prints, and compares or records."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.counts", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write what was counted")
    parser.add_argument("--only", default=",".join(PATHS), help=f"comma-separated, of {', '.join(PATHS)}")
    arguments = parser.parse_args()
    recorded: dict[str, list[float]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    worse = []
    for name in arguments.only.split(","):
        found, before = measure(name), recorded.get(name)
        print(f"{name:16s} {found} calls per step, recorded {before}", flush=True)
        if before is not None and any(now > then * (1 + TOLERANCE) for now, then in zip(found, before, strict=True)):
            worse.append(name)
        if arguments.record:
            recorded[name] = found
    if arguments.record:
        RECORD.write_text(json.dumps(recorded, indent=2) + "\n")
        return 0
    if worse:
        print(f"more calls than recorded: {', '.join(worse)}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
