"""Hooks around a batch are given what they are given in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import one_process, run_trainers
from tests.parity.scenario import differences
from tests.strategy import result_scenarios as results


@pytest.mark.parametrize(
    ("data", "arguments", "options"),
    [
        (2, {}, {}),
        pytest.param(2, {}, {"accumulate_grad_batches": 2}, marks=pytest.mark.wide),
        pytest.param(2, {"micro_batch_size": 1}, {}, marks=pytest.mark.wide),
        pytest.param(2, {"tensor_parallel_size": 2}, {"gradient_clip_val": 0.1}, marks=pytest.mark.wide),
        pytest.param(2, {"weight_sharding": True}, {}, marks=pytest.mark.wide),
    ],
)
def test_hooks_after_a_batch_are_given_the_loss_of_all_replicas(
    data: int, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    expected = one_process(results.judged, None, {}, options)
    arguments = {"micro_batch_size": "auto", **arguments}
    devices = data * arguments.get("tensor_parallel_size", 1)
    for outcome in run_trainers(results.judged, (1, data), arguments, options, devices=devices):
        assert not list(differences("", outcome.value, expected, 1e-9)), outcome.output


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("LeavesEarly", (1, 2)),
        pytest.param("LeavesEarly", (2, 1), marks=pytest.mark.wide),
        pytest.param("LeavesByAll", (1, 2), marks=pytest.mark.wide),
        pytest.param("LeavesByAll", (2, 2), marks=pytest.mark.wide),
    ],
)
def test_all_ranks_leave_an_epoch_together(name: str, layout: tuple[int, int]) -> None:
    expected = one_process(results.left, None, {}, name)
    for outcome in run_trainers(results.left, layout, {}, name, devices=layout[0] * layout[1]):
        assert not list(differences("", outcome.value, expected, 1e-9)), outcome.output


def test_leaving_an_epoch_on_some_ranks_only_is_refused_on_all_with_the_line() -> None:
    for outcome in run_trainers(results.left, (1, 2), {}, "LeavesByBatch", devices=2, check=False, grace=20.0):
        said = f"{outcome.error}{outcome.output}"
        assert "`on_train_batch_start` returned -1 on 1 of 2 ranks only" in said and "result_scenarios.py:" in said, (
            said
        )
        assert "killed" not in str(outcome.error), outcome.stacks
