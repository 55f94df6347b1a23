"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tests.benchmarks import checkpoints, growth, report, start_up, suite

STANDALONE = ("start-up", "checkpoints", *(f"growth-{dimension}" for dimension in growth.DIMENSIONS))


def main() -> None:
    """Runs what was asked for, prints a line for each and keeps a record."""
    arguments = _parse()
    if arguments.suite == "gpu":
        from tests.benchmarks import gpu

        gpu.main(arguments)
        return
    duels = suite.cpu_duels()
    chosen = arguments.only.split(",") if arguments.only else [*duels, *STANDALONE]
    unknown = [name for name in chosen if name not in duels and name not in STANDALONE]
    if unknown:
        sys.exit(f"no benchmark is named {unknown[0]!r}; there are {', '.join([*duels, *STANDALONE])}.")
    entry: dict[str, Any] = {**report.machine(), "rounds": arguments.rounds, "results": {}}
    print({key: value for key, value in entry.items() if key != "results"})
    print(f"{16 * ' '} wall ms: ours, theirs, ratio (quartiles; best)     processor ms of all ranks; peak MB of a rank")
    for name in chosen:
        entry["results"][name] = _run(name, duels, arguments)
    if not arguments.forget:
        report.keep(entry)


def _run(name: str, duels: dict[str, suite.Duel], arguments: argparse.Namespace) -> dict[str, Any]:
    if name.startswith("growth-"):
        return _grow(name.removeprefix("growth-"), arguments)
    if name == "checkpoints":
        return checkpoints.compare(1024, max(3, arguments.rounds))
    if name == "start-up":
        peer, config = "DDPStrategy, two processes, cold", {}
        found = report.summarize(start_up.compare(max(2, arguments.rounds // 3)))
    else:
        duel = duels[name]
        peer, config = duel.peer, {"config": duel.config, "size": vars(duel.size), "ranks": duel.ranks}
        config["steps"] = arguments.steps or duel.steps
        found = report.summarize(suite.play(duel, arguments.rounds, arguments.steps))
    print(report.line(name, peer, found), flush=True)
    return {"peer": peer, **config, **found}


def _grow(dimension: str, arguments: argparse.Namespace) -> dict[str, Any]:
    found = growth.grow(dimension, max(2, arguments.rounds // 2), arguments.steps or 10)
    print(
        f"growth with {dimension}: ours {found['ours']}, torch's Schedule1F1B {found['theirs']}, ratio of slopes "
        f"{found['slope_ratio']:.3f}; at {found['counts']}: {found['points_ms']} ms",
        flush=True,
    )
    return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--suite", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--only", help="comma-separated names; all by default")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each contestant, alternating")
    parser.add_argument("--steps", type=int, help="measured steps in a round; by default what the benchmark says")
    parser.add_argument("--forget", action="store_true", help="do not append this run to history.jsonl")
    gpu = parser.add_argument_group("--suite gpu")
    gpu.add_argument("--model", default="1b", help="1b, 3b or 8b")
    gpu.add_argument("--sequence", type=int, default=4096)
    gpu.add_argument("--batch", type=int, default=4, help="rows per step")
    gpu.add_argument("--tiny", action="store_true", help="try the script without a GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
