"""A hook may call the model, or a layer of it, on one rank: what it gets is what one process gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import one_process, run_trainers
from tests.strategy.one_rank_scenarios import fit

WIDE = pytest.mark.wide
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
REPLICAS: dict[str, Any] = {**TENSOR, "data_parallel_size": 2}
ROWS: list[Any] = [
    ("in_evaluation", TENSOR, 2),
    ("by_all", TENSOR, 2),
    ("mixture", {"expert_parallel_size": 2}, 2),
    ("own_ends", TENSOR, 2),
    ("alone_and_together", TENSOR, 2),
    pytest.param("ends_alone", TENSOR, 2, marks=WIDE),
    *(pytest.param(name, SEQUENCE, 2, marks=WIDE) for name in ("in_evaluation", "twice", "by_all")),
    *(pytest.param(name, TENSOR, 2, marks=WIDE) for name in ("layer_by_keyword", "twice", "uncached")),
    *(
        pytest.param(name, {**TENSOR, "data_parallel_size": 2}, 4, marks=WIDE)
        for name in ("in_evaluation", "twice", "own_ends")
    ),
    pytest.param("mixture", {"expert_parallel_size": 2, **TENSOR}, 4, marks=WIDE),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("name", "arguments", "devices"), ROWS)
def test_a_call_on_one_rank_gives_what_one_process_gets(name: str, arguments: dict[str, Any], devices: int) -> None:
    found = [outcome.value for outcome in run_trainers(fit, name, arguments, devices=devices, deadline=60, grace=20)]
    if "data_parallel_size" in arguments:  # replicas share the samples out, so one process trains another model
        assert all(torch.is_tensor(value) or value for value in found[0][0])
        return
    expected = one_process(fit, name, None)
    torch.testing.assert_close(found[0][0], expected[0], rtol=1e-9, atol=1e-9)
    assert found[0][1] == pytest.approx(expected[1], abs=1e-9)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cached", "calls `LlamaForCausalLM` on some ranks only, with a `DynamicCache` among its arguments"),
        ("generates_elsewhere", "calls `generate` and `net` on rank 0 and 1;"),
        ("others", "calls `net.layers.0` and `net.layers.1` on rank 0 and 1;"),
        pytest.param("copy", "calls a copy of a layer on rank 0;", marks=WIDE),
    ],
)
def test_what_cannot_be_served_is_refused(name: str, said: str) -> None:
    outcomes = run_trainers(fit, name, TENSOR, devices=2, check=False, deadline=60, grace=20)
    assert all(outcome.error is not None for outcome in outcomes), outcomes
    assert all(said in f"{outcome.error}\n{outcome.output}" for outcome in outcomes), outcomes


@pytest.mark.wide
def test_a_backward_through_a_call_on_one_rank_is_refused() -> None:
    outcomes = run_trainers(fit, "backward", TENSOR, devices=2, check=False, deadline=60, grace=20)
    assert all(outcome.error is not None for outcome in outcomes), outcomes
    assert "whose gradients are not summed over ranks with code that only some" in str(outcomes[0].error)
