"""What cannot work is refused on every rank, by name, with the values and the argument to change."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.harness import run_trainers
from tests.strategy import refusal_scenarios as refusals


def _refused(outcomes: list[Any], *patterns: str) -> None:
    for outcome in outcomes:
        assert outcome.error is not None, f"rank {outcome.rank} trained on"
        assert "killed" not in outcome.error, f"rank {outcome.rank} hung\n{outcome.stacks}"
        said = f"{outcome.error}\n{outcome.trace}\n{outcome.output}"
        for pattern in patterns:
            assert re.search(pattern, said, re.IGNORECASE), f"rank {outcome.rank}: no {pattern!r} in\n{said}"


@pytest.mark.parametrize(
    ("module", "patterns"),
    [
        ("manual", ["manual optimi[sz]ation", "pipeline_parallel_size"]),
        ("two_optimizers", ["optimi[sz]ation|optimizers", "pipeline_parallel_size"]),
        ("twice", ["layers", "twice|more than once|2 times|again"]),
        ("never", ["layers", "not called|never|no layer|without calling|did not call|was not"]),
        ("half", ["layers", "not called|never|skip|order|expected|was not"]),
        ("trunkless", ["trunk", "activations", "pipeline_layers"]),
        ("shared", ["layers", "more than once|same"]),
        pytest.param("own_backward", ["backward of its own", "pipeline_parallel_size"], marks=pytest.mark.wide),
        pytest.param("now_and_then", ["logged value `first` depends on `net.layers.0`"], marks=pytest.mark.wide),
        pytest.param("input_gradient", ["from before the layers", "pipeline_parallel_size"], marks=pytest.mark.wide),
    ],
)
def test_a_module_that_cannot_be_cut_is_refused_on_every_rank(module: str, patterns: list[str]) -> None:
    _refused(
        run_trainers(refusals.fit, (2, 1), {}, module, devices=2, check=False, grace=20, deadline=60),
        *patterns,
    )


def test_weight_averaging_is_refused() -> None:
    outcomes = run_trainers(refusals.fit, (2, 1), {}, "plain", "swa", devices=2, check=False, grace=20, deadline=60)
    _refused(outcomes, "StochasticWeightAveraging|weight averaging")


@pytest.mark.parametrize(
    ("arguments", "patterns"),
    [
        ({"pipeline_parallel_size": 3}, ["pipeline_parallel_size", "3", "2"]),
        ({"pipeline_parallel_size": 0}, ["pipeline_parallel_size", "0"]),
        ({"pipeline_parallel_size": 2, "data_parallel_size": 2}, ["data_parallel_size", "2"]),
        ({"pipeline_parallel_size": 2, "micro_batch_size": 0}, ["micro_batch_size", "0"]),
        ({"pipeline_parallel_size": 2, "pipeline_schedule": "2f2b"}, ["2f2b", "1f1b", "gpipe"]),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "net.nothing"}, ["net.nothing", "net.layers"]),
        ({"pipeline_parallel_size": 2, "pipeline_split": [1, 2]}, ["pipeline_split", "4"]),
        ({"pipeline_parallel_size": 2, "pipeline_split": [4]}, ["pipeline_split", "2"]),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_their_values(
    arguments: dict[str, Any], patterns: list[str]
) -> None:
    outcomes = run_trainers(refusals.strategy_with, arguments, devices=2, check=False, grace=20, deadline=60)
    _refused(outcomes, *patterns)


def test_fewer_layers_than_stages_are_refused_with_both_numbers() -> None:
    outcomes = run_trainers(refusals.fit, (3, 1), {}, "short", devices=3, check=False, grace=20, deadline=60)
    _refused(outcomes, "pipeline_parallel_size", "2 layers", "3 (pipeline )?stages")


def test_stages_that_load_different_batches_are_refused_on_every_rank() -> None:
    outcomes = run_trainers(refusals.unequal_batches, (3, 1), devices=3, check=False, grace=20, deadline=60)
    _refused(outcomes, "different batches", "distributed_sampler_kwargs")


def test_callbacks_of_the_other_lightning_namespace_are_refused_by_name() -> None:
    outcomes = run_trainers(refusals.old_callback, devices=2, check=False, grace=20, deadline=60)
    _refused(outcomes, "pytorch_lightning", "lightning.pytorch")


@pytest.mark.parametrize("module", ["manual", "two_optimizers", "twice", "never", "trunkless", "shared"])
def test_without_a_pipeline_nothing_of_this_is_refused(module: str) -> None:
    run_trainers(refusals.fit, (1, 2), {}, module, devices=2)


@pytest.mark.wide
@pytest.mark.parametrize("stages", [2, 3])
def test_gradients_behind_the_layers_are_those_of_one_process(stages: int) -> None:
    expected = run_trainers(refusals.late_gradient, None, {}, devices=1)[0].value
    for outcome in run_trainers(refusals.late_gradient, (stages, 1), {}, devices=stages):
        for name, weight in outcome.value.items():
            assert torch.allclose(weight, expected[name], rtol=1e-9, atol=1e-9), name
