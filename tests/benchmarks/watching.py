"""What it costs to watch over values of other stages: the small GPT at two stages, with and without, in one run.

``python -m tests.benchmarks.watching`` alternates rounds in the same processes. Without means that layers are not
compared before and after their calls, and that stand-ins are ordinary tensors. The ratio of the processor times of a
step is printed, by rank: medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any
from unittest import mock

from lightning_megatron import MegatronStrategy
from lightning_megatron.pipeline.elsewhere.away import unmarked
from lightning_megatron.pipeline.stage.side_effects import SideEffects
from tests.benchmarks.contestants import Round, alternate, trainer_round
from tests.benchmarks.model import Size
from tests.harness import RankInfo, run_job


def _run(_: Any, index: int, run: Any, args: Any, kwargs: Any) -> Any:
    return run(*args, **kwargs)


def play(info: RankInfo, size: Size, steps: int, rounds: int) -> list[tuple[Round, Round]]:
    """Rounds with and without."""

    def watched() -> Round:
        strategy = MegatronStrategy(pipeline_parallel_size=2, micro_batch_size=size.micro_batch)
        return trainer_round(info, size, steps, strategy, size.batch)

    def unwatched() -> Round:
        no_log = mock.patch.object(SideEffects, "take_log", lambda *_: False)
        with mock.patch.object(SideEffects, "around", _run), no_log, unmarked():
            return watched()

    return alternate(watched, unwatched, rounds)


def main() -> None:
    """Print one line per rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    from tests.benchmarks import watching  # by the name that worker processes import

    for outcome in run_job(watching.play, 2, Size(), options.steps, options.rounds, deadline=900):
        ratios = [watched.cpu / unwatched.cpu for watched, unwatched in outcome.value]
        milliseconds = statistics.median(1e3 * watched.cpu for watched, _ in outcome.value)
        print(f"rank {outcome.rank}: {statistics.median(ratios):.4f} of {milliseconds:.1f} ms ({sorted(ratios)})")


if __name__ == "__main__":
    main()
