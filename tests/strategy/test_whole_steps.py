"""Optimizers that need all parameters together step on whole ones over tensor-parallel ranks, as in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_trainers
from tests.parity.scenario import differences
from tests.strategy import whole_step_scenarios as whole_steps

WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("kind", "data", "arguments", "options"),
    [
        ("around another", 1, {"tensor_parallel_size": 2}, {}),
        pytest.param("around another", 2, {"tensor_parallel_size": 2, "sequence_parallel": True}, {}, marks=WIDE),
        pytest.param("around another", 2, {"tensor_parallel_size": 2}, {"accumulate_grad_batches": 2}, marks=WIDE),
        pytest.param("wolfe", 1, {"tensor_parallel_size": 2}, {}, marks=WIDE),
        pytest.param("wolfe", 2, {"tensor_parallel_size": 2, "sequence_parallel": True}, {}, marks=WIDE),
        pytest.param("coupled", 1, {"tensor_parallel_size": 2}, {"gradient_clip_val": 0.1}, marks=WIDE),
        pytest.param("coupled", 2, {"tensor_parallel_size": 2}, {}, marks=WIDE),
        ("marked", 2, {}, {}),
        pytest.param("marked", 2, {"weight_sharding": True}, {}, marks=WIDE),
        pytest.param("marked", 2, {"tensor_parallel_size": 2}, {}, marks=WIDE),
        pytest.param("marked, coupled", 1, {"tensor_parallel_size": 2}, {}, marks=WIDE),
        pytest.param("coupled", 1, {"tensor_parallel_size": 2, "context_parallel_size": 2}, {}, marks=WIDE),
    ],
    ids=str,
)
def test_an_optimizer_of_all_parameters_together_is_that_of_one_process(
    kind: str, data: int, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    expected = run_trainers(whole_steps.fit, None, {}, kind, options, devices=1)[0].value
    devices = data * arguments.get("tensor_parallel_size", 1) * arguments.get("context_parallel_size", 1)
    for outcome in run_trainers(whole_steps.fit, (1, data), arguments, kind, options, devices=devices):
        found = list(differences("metrics", outcome.value[0], expected[0], 1e-9))
        assert not found and outcome.value[1] == expected[1], f"rank {outcome.rank}: " + "\n".join(found[:10])


@pytest.mark.parametrize(
    ("kind", "layout", "arguments", "wanted"),
    [
        ("list apart", (1, 1), {"tensor_parallel_size": 2}, "ListApart keeps parameters in `own`"),
        pytest.param("another way", (1, 1), {"tensor_parallel_size": 2}, "has changed parameters that", marks=WIDE),
        pytest.param("beyond step", (1, 1), {"tensor_parallel_size": 2}, "calls `ascend` of AroundAnother", marks=WIDE),
        pytest.param("coupled", (2, 1), {}, "Coupled needs all parameters together", marks=WIDE),
        pytest.param("coupled", (1, 2), {"nonfinite": "skip"}, "Leave out `nonfinite='skip'`", marks=WIDE),
    ],
    ids=str,
)
def test_one_that_would_step_on_slices_is_refused_on_every_rank(
    kind: str, layout: tuple[int, int], arguments: dict[str, Any], wanted: str
) -> None:
    for outcome in run_trainers(whole_steps.fit, layout, arguments, kind, {}, devices=2, check=False, grace=20.0):
        assert outcome.error is not None and "killed" not in outcome.error, f"rank {outcome.rank}: {outcome.error}"
        assert wanted in f"{outcome.error}\n{outcome.output}", outcome.error


def test_a_step_that_cannot_be_left_out_is_refused_in_one_process() -> None:
    (outcome,) = run_trainers(whole_steps.fit, (1, 1), {"nonfinite": "skip"}, "wolfe", {}, devices=1, check=False)
    assert "LBFGS needs all parameters together" in str(outcome.error)
