"""Tokens per second of a pipeline whose stages sleep: several groups of requests at once, and one after the other.

``python -m tests.benchmarks.decoding [--stages 2,4] [--unit 0.05]``; nothing here is asserted. A stage sleeps as long
for each batch, whatever its size, as reading weights takes. A *turn* is one stage's work on one token of one batch. The
ideal is the turns of a stage and of those before it, asleep and nothing else. What is above it, per turn, does not
depend on ``--unit``: each process computes its part of every token (the last columns), and here all of them share the
cores of one machine, which stages on machines of their own do not.
"""

from __future__ import annotations

import argparse

from tests.generation.side_by_side import NEW, filled, timed
from tests.harness import run_job


def main() -> None:
    """Measures each number of stages asked for and prints a line for it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.decoding", description=__doc__)
    parser.add_argument("--stages", default="2,4", help="comma-separated")
    parser.add_argument("--unit", type=float, default=0.05, help="seconds that a stage sleeps")
    parser.add_argument("--prefill", action="store_true", help="the time to the first tokens, prompts one at a time")
    arguments = parser.parse_args()
    if arguments.prefill:
        _prefill(list(map(int, arguments.stages.split(","))), arguments.unit)
        return
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


def _prefill(counts: list[int], unit: float) -> None:
    """Whole batches of four prompts, as many as stages, and one prompt at a time; a prompt takes ``unit`` per stage."""
    print("stages  whole batches  one prompt at a time      ideal")
    for stages in counts:
        outcomes = run_job(filled, stages, stages, unit, deadline=380.0)
        whole, apart = (max(times) for times in zip(*(outcome.value for outcome in outcomes), strict=True))
        ideal = (4 * stages + stages - 1) * unit, 4 * (2 * stages - 1) * unit
        print(f"{stages:6d} {whole:12.2f} s {apart:19.2f} s {ideal[1]:8.2f}, {ideal[0]:.2f} s", flush=True)


if __name__ == "__main__":
    main()
