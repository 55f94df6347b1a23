"""Training steps that call the layers twice, on pipeline stages that sleep: micro-batches in turns, and whole batches.

``python -m tests.benchmarks.passes [--stages 2,4] [--unit 0.005]``; nothing here is asserted. A row of a batch takes
``unit`` seconds in a layer's forward and twice as long in its backward; each stage has two layers, and a step calls all
of them twice, with a head behind them that takes no time. The ideal is 1F1B's: (m + p - 1) micro-batches of a stage.
"""

from __future__ import annotations

import argparse

from tests.generation.turns import ROWS, timed
from tests.harness import run_job


def main() -> None:
    """Measures each number of stages asked for and prints a line for it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.passes", description=__doc__)
    parser.add_argument("--stages", default="2,4", help="comma-separated")
    parser.add_argument("--unit", type=float, default=0.005, help="seconds that a row takes in a layer's forward")
    arguments = parser.parse_args()
    print("stages  micro-batches  whole batches   in turns      ideal   gain, of the ideal's")
    for stages in map(int, arguments.stages.split(",")):
        found = [
            max(outcome.value for outcome in run_job(timed, stages, stages, arguments.unit, whole, deadline=380.0))
            for whole in (True, False)
        ]
        parts = 4 * stages
        one = 2 * 2 * 3 * arguments.unit * ROWS / parts  # passes, layers, forward and backward: of a micro-batch
        ideal = (parts + stages - 1) * one
        gain, most = found[0] / found[1], stages * parts / (parts + stages - 1)
        print(
            f"{stages:6d} {parts:14d} {found[0]:12.2f} s {found[1]:8.2f} s {ideal:8.2f} s"
            f" {gain:6.2f} {gain / most:10.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
