"""What users do beside the ordinary loop gives on every rank what it gives on one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_trainers
from tests.parity.scenario import compare_scenario, differences, one_process
from tests.parity.zoo.data import BATCH
from tests.strategy import habit_scenarios as habits

SAME = [
    habits.shuffled,
    habits.hand_made,
    habits.named_samples,
    habits.fast_dev_run,
    habits.unfrozen_later,
    habits.finetuned,
    habits.ragged,
    habits.ragged_beside,
    habits.ragged_of_one_length,
    habits.skipped,
]


@pytest.mark.everyday(2)
@pytest.mark.parametrize("scenario", SAME, ids=lambda scenario: scenario.__name__)
def test_a_habit_gives_what_it_gives_on_one_process(scenario: Any) -> None:
    compare_scenario(scenario, (2, 1))


@pytest.mark.parametrize(("rank", "wanted"), [(0, "returned None without having"), (1, "on an earlier pipeline")])
def test_a_batch_that_one_stage_leaves_out_is_refused_on_every_rank(rank: int, wanted: str) -> None:
    for outcome in run_trainers(habits.skipped_by_one, (2, 1), {}, rank, devices=2, check=False, grace=20.0):
        assert wanted in f"{outcome.error}{outcome.output}", outcome.error


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_the_first_rank_shows_real_losses_and_the_whole_model(tensor: int) -> None:
    (plain,) = run_trainers(habits.shown, None, {}, devices=1)
    first, *others = run_trainers(habits.shown, (2, 1), {"tensor_parallel_size": tensor}, devices=2 * tensor)
    assert f"train_loss={first.value}" in first.output, first.output
    counts = [line for line in plain.output.splitlines() if "params" in line and any(c.isdigit() for c in line)]
    assert counts, plain.output
    for line in counts:
        assert line in first.output, first.output
    assert not any("train_loss" in other.output for other in others)


def test_a_checkpoint_left_by_an_exception_is_whole_and_goes_on() -> None:
    expected = one_process(habits.straight_to_six)
    for outcome in run_trainers(habits.saved_on_exception, (2, 1), {}, devices=2):
        assert not list(differences("", outcome.value, expected, 1e-9))


def test_the_registered_name_trains_replicas_of_the_module() -> None:
    values = [outcome.value for outcome in run_trainers(habits.by_name, devices=2)]
    assert values[0] == values[1]
    assert values[0][:2] == [2, True]


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-true", 1e-1)])
def test_other_precisions_stay_as_close_as_their_digits(precision: str, tolerance: float) -> None:
    (plain,) = run_trainers(habits.in_precision, None, {}, precision, devices=1)
    for outcome in run_trainers(habits.in_precision, (2, 1), {}, precision, devices=2):
        assert outcome.value == pytest.approx(plain.value, abs=tolerance)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("layout", "tensor"), [((2, 1), 1), ((1, 1), 2)])
def test_a_module_goes_from_one_trainer_to_the_next(layout: Any, tensor: int) -> None:
    expected = one_process(habits.two_trainers)
    devices = layout[0] * layout[1] * tensor
    for outcome in run_trainers(habits.two_trainers, layout, {"tensor_parallel_size": tensor}, devices=devices):
        assert not list(differences("", outcome.value, expected, 1e-9))


def test_a_part_of_a_module_is_not_taken_for_a_whole_one() -> None:
    for outcome in run_trainers(habits.another_layout, (1, 1), {}, devices=2, check=False, grace=20.0):
        assert "`tensor_parallel_size=2` by an earlier run" in f"{outcome.error}{outcome.output}", outcome


@pytest.mark.everyday(1)
@pytest.mark.parametrize("stages", [2, 3])
def test_buffers_that_a_step_fills_are_those_of_one_process_on_every_rank(stages: int) -> None:
    # In one micro-batch, since a mean over a batch is not one over its parts.
    compare_scenario(habits.buffers_filled, (stages, 1), micro_batch_size=BATCH)
