"""Counting the calls that a step makes, on each rank."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any
from unittest import mock

from lightning_megatron import MegatronStrategy
from tests.benchmarks import contestants
from tests.benchmarks.contestants import trainer_round
from tests.benchmarks.model import Size
from tests.harness import RankInfo

STEPS = 8
SIZE = Size(layers=4, hidden=16, heads=2, sequence=4, vocabulary=32, micro_batches=4)


def count(info: RankInfo, arguments: dict[str, Any]) -> float:
    """Calls per step on this rank."""
    profile = cProfile.Profile()

    class Counted(contestants.Clock):
        def __init__(self) -> None:
            super().__init__()
            profile.enable()

        def per_step(self, steps: int) -> tuple[float, float]:
            profile.disable()
            return super().per_step(steps)

    with mock.patch.object(contestants, "Clock", Counted):
        replicas = arguments.get("data_parallel_size", 1)
        trainer_round(info, SIZE, STEPS, MegatronStrategy(**arguments), SIZE.batch // replicas)
    stats: Any = pstats.Stats(profile)
    return round(stats.total_calls / STEPS, 1)
