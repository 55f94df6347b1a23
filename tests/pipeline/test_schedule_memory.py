"""Every schedule holds as many activations as its checker says: saved tensors are counted, not believed."""

from __future__ import annotations

import pytest

from lightning_megatron.pipeline.schedule import Placement, make_schedule
from lightning_megatron.pipeline.timeline import activations_in_flight
from tests.harness import run_trainers
from tests.pipeline.memory_scenarios import activations

MICRO_BATCHES = 8


@pytest.mark.everyday(1)
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
def test_a_schedule_holds_what_its_checker_says(schedule: str) -> None:
    plan = make_schedule(schedule, 3, MICRO_BATCHES)
    peaks = activations_in_flight(plan)
    outcomes = run_trainers(activations, plan.stages, MICRO_BATCHES, schedule, devices=plan.stages)
    for rank, outcome in enumerate(outcomes):
        stage = plan.stages - 1 - rank if plan.placement is Placement.LOOP else rank
        allowed = peaks[stage] / plan.chunks
        assert outcome.value["left"] == 0, outcome.value
        assert outcome.value["in_flight"] < allowed + 0.35, (stage, allowed, outcome.value)
        assert outcome.value["in_flight"] < MICRO_BATCHES - 1, "or nothing is ever let go of"
