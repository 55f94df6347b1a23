"""Tokens per second of a pipeline whose stages sleep: several groups of requests at once, and one after the other.

``python -m tests.benchmarks.decoding [--stages 2,4] [--unit 0.05]``; nothing here is asserted. A stage sleeps as long
for each batch, whatever its size, as reading weights takes.
"""

from __future__ import annotations

import argparse

from tests.generation.side_by_side import timed
from tests.harness import run_job


def main() -> None:
    """Measures each number of stages asked for and prints a line for it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.decoding", description=__doc__)
    parser.add_argument("--stages", default="2,4", help="comma-separated")
    parser.add_argument("--unit", type=float, default=0.05, help="seconds that a stage sleeps")
    arguments = parser.parse_args()
    print("stages  batches  one group    together   tokens/s against one group, of the stages")
    for stages in map(int, arguments.stages.split(",")):
        batches = 4 * stages
        outcomes = run_job(timed, stages, stages, arguments.unit, batches, deadline=380.0)
        alone, together = (max(times) for times in zip(*(outcome.value for outcome in outcomes), strict=True))
        gain = alone / together
        print(
            f"{stages:6d} {batches:8d} {alone:8.2f} s {together:9.2f} s {gain:10.2f} {gain / stages:6.0%}", flush=True
        )


if __name__ == "__main__":
    main()
