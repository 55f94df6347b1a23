"""Tokens per second of a pipeline whose stages sleep: several groups of requests at once, and one after the other.

``python -m tests.benchmarks.decoding [--stages 2,4] [--unit 0.05]``; nothing here is asserted. A stage sleeps as long
for each batch, whatever its size, as reading weights takes. A *turn* is one stage's work on one token of one batch. The
ideal is the turns of a stage and of those before it, asleep and nothing else. What is above it, per turn, does not
depend on ``--unit``: each process computes its part of every token (the last columns), and here all of them share the
cores of one machine, which stages on machines of their own do not.
"""

from __future__ import annotations

import argparse

from tests.generation.side_by_side import NEW, timed
from tests.harness import run_job


def main() -> None:
    """Measures each number of stages asked for and prints a line for it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.decoding", description=__doc__)
    parser.add_argument("--stages", default="2,4", help="comma-separated")
    parser.add_argument("--unit", type=float, default=0.05, help="seconds that a stage sleeps")
    arguments = parser.parse_args()
    print("stages  batches  one group   together      ideal   against one group, of stages   per turn: above, computed")
    for stages in map(int, arguments.stages.split(",")):
        batches = 4 * stages
        outcomes = run_job(timed, stages, stages, arguments.unit, batches, deadline=380.0)
        alone, together, computed = (max(times) for times in zip(*(outcome.value for outcome in outcomes), strict=True))
        turns = NEW * batches
        ideal, gain = (turns + stages - 1) * arguments.unit, alone / together
        print(
            f"{stages:6d} {batches:8d} {alone:8.2f} s {together:8.2f} s {ideal:8.2f} s {gain:17.2f}"
            f" {gain / stages:10.0%}   {(together - ideal) / turns * 1e3:12.1f} ms {computed / turns * 1e3:6.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
