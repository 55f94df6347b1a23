"""A step whose rows for experts travel over a slow link, with the shared expert meanwhile and after them.

``python -m tests.benchmarks.expert_overlap --link 20 --shared 20`` (milliseconds) alternates both in the same two
processes. A message takes as long as the link does, and the shared expert sleeps, in forward and backward, so
two busy cores show what two GPUs would: of two messages in each direction one is hidden behind it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.experts.exchange import sending
from lightning_megatron.layers import MoE
from tests.benchmarks.contestants import trainer_round
from tests.benchmarks.model import Size, Task
from tests.benchmarks.sleeping import Sleep
from tests.harness import RankInfo, run_job


class SlowWork:
    """A message that is there only after a while."""

    def __init__(self, work: Any, seconds: float) -> None:
        self._work, self._there = work, time.perf_counter() + seconds

    def wait(self) -> None:
        self._work.wait()
        if (left := self._there - time.perf_counter()) > 0:  # a sleep of no time gives the core to others
            time.sleep(left)


class _Shared(nn.Module):
    """A shared expert that sleeps."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.seconds, self.seconds)  # type: ignore[no-any-return]


class Afterwards(MoE):
    """The shared expert after the others."""

    def _mixed(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = self.experts(rows, index, weights)
        assert self.shared is not None
        return out + self.shared(rows)  # type: ignore[no-any-return]


class Mixtures(Task):
    """The small GPT with a mixture in the place of each MLP."""

    def __init__(self, size: Size, kind: type[MoE], seconds: float) -> None:
        super().__init__(size)
        for block in self.net.layers:
            block.up, block.down = kind(size.hidden, size.hidden, 4, top_k=2, gated=False), nn.Identity()
            block.up.shared = _Shared(seconds)


def compete(info: RankInfo, size: Size, link: float, shared: float, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the steps of each round, in turn."""
    plain = sending.start_all_to_all_rows
    found: dict[str, list[float]] = {}

    def slow(*args: Any) -> tuple[Tensor, Any]:
        arrived, work = plain(*args)
        return arrived, SlowWork(work, link)

    with mock.patch.object(sending, "start_all_to_all_rows", slow):
        for _ in range(rounds):
            for name, kind in (("afterwards", Afterwards), ("meanwhile", MoE)):
                strategy = MegatronStrategy(expert_parallel_size=info.world_size, expert_balance="replica")
                own = trainer_round(info, size, steps, strategy, 2, partial(Mixtures, kind=kind, seconds=shared))
                found.setdefault(name, []).append(own.seconds)
    return found


def main() -> None:
    """Runs what was asked for, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("link", 20), ("shared", 20), ("steps", 5), ("rounds", 3), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    size = Size(layers=given.layers, hidden=32, sequence=16)
    asked = size, given.link / 1e3, given.shared / 1e3, given.steps, given.rounds
    ranks = [outcome.value for outcome in run_job(compete, 2, *asked, deadline=300.0)]
    seconds = {name: [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}
    ratio = statistics.median(one / other for one, other in zip(*reversed(seconds.values()), strict=True))
    for name, each in seconds.items():
        print(f"{name:12s} {statistics.median(each) * 1e3:8.1f} ms per step")
    print(f"{'ratio':12s} {ratio:8.2f}")


if __name__ == "__main__":
    from tests.benchmarks import expert_overlap  # workers import what they run by name

    expert_overlap.main()
