"""Modules written for Lightning's ModelParallelStrategy train here as they are, at pipeline size 1."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data_parallel.presplit_scenarios import fit
from tests.harness import run_trainers
from tests.harness.remember import remembered
from tests.parity.compare import compare


@remembered
def one_process() -> Any:
    return run_trainers(fit, None, {}, True, {}, devices=1)[0].value


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ((2, 1), {}),
        ((2, 2), {"sequence": True}),
        pytest.param((2, 1), {"sequence": True}, marks=pytest.mark.wide),
        pytest.param((2, 2), {}, marks=pytest.mark.wide),
        pytest.param((2, 2), {"shard": True}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_module_that_splits_itself_over_the_mesh_trains_as_one_process(sizes: Any, kind: dict[str, Any]) -> None:
    outcomes = run_trainers(fit, sizes, kind, True, {}, devices=sizes[0] * sizes[1])
    found = list(compare([outcome.value for outcome in outcomes], one_process(), 1e-9))
    assert not found, "\n".join(found[:12])


@pytest.mark.wide
def test_replicas_that_drew_different_weights_start_from_those_of_the_first() -> None:
    outcomes = run_trainers(fit, (2, 2), {}, False, {}, devices=4)
    found = list(compare([outcome.value for outcome in outcomes], one_process(), 1e-9))
    assert not found, "\n".join(found[:12])


@pytest.mark.parametrize(
    "others", [{"micro_batch_size": 2}, {"sequence_parallel": True}, {"tensor_parallel_plan": {"head": "colwise"}}]
)
def test_options_that_a_module_which_splits_itself_would_ignore_are_refused(others: dict[str, Any]) -> None:
    outcomes = run_trainers(fit, (2, 1), {}, True, others, devices=2, check=False, grace=20)
    for outcome in outcomes:
        assert outcome.error is not None
        assert f"{next(iter(others))}=" in outcome.error and "DTensors" in outcome.error


@pytest.mark.parametrize("option", ["weight_sharding", pytest.param("optimizer_offload", marks=pytest.mark.wide)])
def test_weights_and_state_of_a_module_which_splits_itself_stay_where_it_has_them(option: str) -> None:
    outcomes = run_trainers(fit, (1, 2), {"shard": True}, True, {option: True}, devices=2, check=False, grace=20)
    for outcome in outcomes:
        assert outcome.error is not None
        assert f"`{option}" in outcome.error and "cannot be combined with a module whose own" in outcome.error
