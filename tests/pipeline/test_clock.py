"""What the executor records is what happened: the times of sleeping layers, the gaps, the order of the schedule."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron.callbacks import PipelineProfile
from lightning_megatron.pipeline.schedule import join_halves, lower, make_schedule
from tests.benchmarks.sleeping import Sleeps, simulated
from tests.harness import JobFailed, run_trainers
from tests.pipeline.clock_scenarios import profiled, recorded

pytestmark = pytest.mark.alone
SLEEPS = Sleeps(stages=3, micro_batches=5, forward=0.02, backward_input=0.04, backward_weight=0.02)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_recorded_step_shows_the_schedule_and_its_times(schedule: str, tmp_path: Path) -> None:
    outcomes = run_trainers(recorded, schedule, SLEEPS, str(tmp_path), devices=3)
    first = outcomes[0].value
    assert all(outcome.value["measured"] == first["measured"] for outcome in outcomes), (
        "every rank has the same picture"
    )
    measured = first["measured"]
    made = make_schedule(schedule, SLEEPS.stages, SLEEPS.micro_batches)
    assert measured.schedule == join_halves(lower(made)).computations()
    assert measured.makespan > simulated(schedule, SLEEPS) * 0.99
    chunks = measured.schedule.chunks
    seconds = {"F": 0.02 / chunks, "I": 0.04 / chunks, "W": 0.02 / chunks, "B": 0.06 / chunks}
    for rank, steps in enumerate(measured.schedule.instructions):
        for step, start, end in zip(steps, measured.starts[rank], measured.ends[rank], strict=True):
            assert end - start > seconds[step.kind.value] * 0.98, (rank, str(step), end - start)
        assert all(end <= start for end, start in zip(measured.ends[rank], measured.starts[rank][1:], strict=False))
    assert first["predicted"].makespan > simulated(schedule, SLEEPS) * 0.98  # sleeps may last longer, never shorter
    assert measured.bubble_fraction > 0
    trace = json.loads((tmp_path / "timeline-step2.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == sum(map(len, measured.schedule.instructions))
    assert all((tmp_path / f"timeline-step2{kind}.svg").read_text().startswith("<svg") for kind in ("", "-predicted"))


def test_a_strategy_that_records_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="record_timeline=True"):
        run_trainers(recorded, "1f1b", SLEEPS, str(tmp_path), False, devices=3)


@pytest.mark.parametrize(("schedule", "contained"), [("1f1b", True), ("zb-h1", False)])
def test_a_profile_names_the_imbalance_and_the_split_that_would_be_even(schedule: str, contained: bool) -> None:
    # 4 layers whose forwards take 1, 2, 3 and 4 units, and a head that takes 2: two stages are even as 1+2+3 and 4+2.
    sleeps = Sleeps(stages=2, micro_batches=3, forward=0.02, backward_input=0.0, backward_weight=0.0)
    values = [outcome.value for outcome in run_trainers(profiled, schedule, sleeps, [2, 2], contained, devices=2)]
    assert values[0] == values[1]
    assert values[0]["split"] == [3, 1] and not values[0]["left"]
    assert 1.3 < values[0]["imbalance"] < 1.7, "3 and 9 units: 1.5 times the mean"
    assert "`pipeline_split=[3, 1]` instead of [2, 2]" in values[0]["report"], values[0]["report"]


def test_a_profile_adds_up_the_pieces_of_a_stage_and_proposes_nothing_that_gains_nothing() -> None:
    # One layer each: stage 0 has 1 + 4 units and the head's 2, stage 1 has 2 + 3.
    sleeps = Sleeps(stages=2, micro_batches=3, forward=0.02, backward_input=0.0, backward_weight=0.0)
    for outcome in run_trainers(profiled, "zb-v", sleeps, [1, 1, 1, 1], devices=2):
        assert 1.1 < outcome.value["imbalance"] < 1.25, "7 and 5 units: 1.17 times the mean"
        assert outcome.value["split"] == [1, 1, 1, 1]
        assert "`pipeline_split=[1, 1, 1, 1]`, as it is, is the most even" in outcome.value["report"]


def test_a_run_too_short_for_a_report_leaves_no_watch_behind() -> None:
    sleeps = Sleeps(stages=2, micro_batches=2, forward=0.0, backward_input=0.0, backward_weight=0.0)
    for outcome in run_trainers(profiled, "1f1b", sleeps, [2, 2], False, 9, devices=2):
        assert not outcome.value["report"] and not outcome.value["left"]


def test_two_profiles_of_one_run_are_refused() -> None:
    trainer = SimpleNamespace(strategy=SimpleNamespace(records_timeline=True), callbacks=[PipelineProfile()] * 2)
    with pytest.raises(MisconfigurationException, match="2 PipelineProfile callbacks"):
        trainer.callbacks[0].setup(trainer, None, "fit")  # type: ignore[arg-type]
