"""Lightning's ordinary life gives on every rank what it gives on one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.harness import run_trainers
from tests.parity.scenario import compare_scenario, differences, one_process
from tests.strategy import life_scenarios as life
from tests.strategy import logging_scenarios as logging

WHOLE = {"micro_batch_size": "auto"}
BOTH = pytest.mark.parametrize("layout", [(2, 1), (2, 2)], ids=["pp2", "pp2xdp2"])


@pytest.mark.everyday(1)
@BOTH
def test_every_kind_of_logged_value_arrives_in_every_view(layout: tuple[int, int]) -> None:
    compare_scenario(logging.everything_logged, layout)


@pytest.mark.parametrize("layout", [(2, 1), pytest.param((1, 1), marks=pytest.mark.wide)], ids=["pp2", "pp1"])
def test_scores_of_a_batch_that_are_no_means_are_those_of_the_whole_batch(layout: tuple[int, int]) -> None:
    compare_scenario(logging.batches_scored, layout)


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.wide)], ids=["pp2", "pp2xtp2"])
def test_norms_of_gradients_that_a_hook_logs_are_those_of_the_whole_model(tensor: int) -> None:
    arguments = {"tensor_parallel_size": tensor}
    reference = one_process(logging.gradients_logged)
    for outcome in run_trainers(logging.gradients_logged, (2, 1), arguments, devices=2 * tensor):
        assert not list(differences("", outcome.value, reference, 1e-9))


def test_loggers_monitors_and_early_stopping_see_the_same_run() -> None:
    reference = one_process(logging.files_written)
    first, *others = [outcome.value for outcome in run_trainers(logging.files_written, (2, 1), {}, devices=2)]
    assert first == reference
    assert all(other == {**reference, "columns": None} for other in others)


def test_what_is_logged_for_rank_zero_only_arrives_there_and_nowhere_else() -> None:
    reference = one_process(logging.logged_on_the_first_rank)
    assert reference.keys() == {"first_step", "first_epoch", "samples"}
    alone, *_ = run_trainers(logging.logged_on_the_first_rank, (1, 1), WHOLE, devices=1)
    assert alone.value == reference
    first, other = [outcome.value for outcome in run_trainers(logging.logged_on_the_first_rank, (2, 1), {}, devices=2)]
    assert not list(differences("", first, reference, 1e-9)) and not other


def test_one_process_refuses_a_log_at_the_line_that_makes_it() -> None:
    reference = one_process(logging.refused_at_the_line)
    assert len(reference) == 4 and "dataloader_idx" in reference[0]
    assert run_trainers(logging.refused_at_the_line, (1, 1), WHOLE, devices=1)[0].value == reference


@pytest.mark.everyday(1)
@BOTH
def test_a_padded_token_mean_is_exact_with_a_loss_weight(layout: tuple[int, int]) -> None:
    compare_scenario(logging.padded_mean, layout)


@pytest.mark.parametrize("uncut", ["auto", 64])
def test_a_loss_weight_counts_over_replicas_that_cut_nothing(uncut: Any) -> None:
    compare_scenario(logging.padded_mean, (1, 2), micro_batch_size=uncut)


@pytest.mark.everyday(1)
@BOTH
def test_hooks_are_called_in_the_order_and_number_of_one_process(layout: tuple[int, int]) -> None:
    compare_scenario(life.hooks_called, layout)


@pytest.mark.everyday(1)
@BOTH
def test_validate_fit_test_and_fit_again_on_one_trainer(layout: tuple[int, int]) -> None:
    compare_scenario(life.verbs_in_turn, layout)


@BOTH
def test_predict_returns_the_replicas_predictions_in_order_on_every_rank(layout: tuple[int, int]) -> None:
    compare_scenario(life.predictions, layout, own=partial(life.part_of_predictions, layout[1]))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("scenario", [life.limits, life.overfit, life.iterable, life.two_loaders])
def test_limits_streams_and_several_loaders_end_with_the_same_metrics(scenario: Any) -> None:
    compare_scenario(scenario, (2, 2) if scenario is life.iterable else (2, 1))


@pytest.mark.everyday(1)
@BOTH
def test_a_resumed_run_is_the_uninterrupted_run(layout: tuple[int, int]) -> None:
    expected = one_process(life.straight)
    for outcome in run_trainers(life.resumed, layout, {}, devices=layout[0] * layout[1]):
        assert not list(differences("", outcome.value, expected, 1e-9))
