"""A step with experts on every replica, with experts shared out, and of a dense model with as many products per token.

Where they are shared out, replicas tell each other before a backward which exchanges theirs comes to; one contestant
does not.

``python -m tests.benchmarks.experts --ranks 2`` alternates them in the same processes, with the same tokens, in float32
over gloo; each token has two experts of half an MLP's width. Ratios are medians over the rounds. Processor time is that
of all ranks together, which neighbours on the machine disturb less than the clock.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

from torch import nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers import MoE
from lightning_megatron.mesh.messages.joint_backwards import JointBackwards
from tests.benchmarks.contestants import Round, trainer_round
from tests.benchmarks.model import Size, Task
from tests.harness import RankInfo, run_job

UNTOLD = "backwards untold"


class MixtureTask(Task):
    """The small GPT with a mixture in the place of each MLP.

    Args:
        size: of the model.
        experts: in each layer.
    """

    def __init__(self, size: Size, experts: int) -> None:
        super().__init__(size)
        for block in self.net.layers:
            block.up = MoE(size.hidden, 2 * size.hidden, experts, top_k=2, gated=False)
            block.down = nn.Identity()


def contestants(ranks: int, experts: int) -> dict[str, tuple[dict[str, Any], Callable[[Size], Task]]]:
    """Options of the strategy and the task of each, by name; the others are compared with the first."""
    mixture = partial(MixtureTask, experts=experts)
    found: dict[str, tuple[dict[str, Any], Callable[[Size], Task]]] = {"every replica": ({}, mixture)}
    found["shared out"] = found[UNTOLD] = ({"expert_parallel_size": ranks}, mixture)
    if ranks % 2 == 0:
        found["over tensor ranks"] = ({"expert_parallel_size": ranks, "tensor_parallel_size": 2}, mixture)
    found["dense"] = ({}, Task)
    return found


def compete(info: RankInfo, size: Size, experts: int, steps: int, rounds: int) -> dict[str, list[Round]]:
    """Rounds of each, in turn."""
    entries = contestants(info.world_size, experts)
    found: dict[str, list[Round]] = {name: [] for name in entries}
    for _ in range(rounds):
        for name, (options, task) in entries.items():
            told = mock.patch.object(JointBackwards, "further_roots", return_value=[])
            replicas = info.world_size // options.get("tensor_parallel_size", 1)
            strategy = MegatronStrategy(**options)
            with told if name == UNTOLD else nullcontext():
                found[name].append(trainer_round(info, size, steps, strategy, size.batch // replicas, task))
    return found


def main() -> None:
    """Runs what was asked for, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("ranks", 2), ("experts", 8), ("hidden", 256), ("layers", 4), ("steps", 10), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    size = Size(layers=given.layers, hidden=given.hidden, sequence=128)
    asked = size, given.experts, given.steps, given.rounds
    ranks = [outcome.value for outcome in run_job(compete, given.ranks, *asked, deadline=900.0)]
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for name in ranks[0]:
        seconds[name] = [max(rank[name][index].seconds for rank in ranks) for index in range(given.rounds)]
        cpu[name] = [sum(rank[name][index].cpu for rank in ranks) for index in range(given.rounds)]
    first = next(iter(seconds))
    for name in seconds:
        wall, used = (
            statistics.median(own / other for own, other in zip(each[name], each[first], strict=True))
            for each in (seconds, cpu)
        )
        print(
            f"{name:18s} {statistics.median(seconds[name]) * 1e3:8.1f} ms ({wall:.2f} of {first!r})   "
            f"processor {statistics.median(cpu[name]) * 1e3:8.1f} ms ({used:.2f})"
        )


if __name__ == "__main__":
    from tests.benchmarks import experts  # workers import what they run by name

    experts.main()
