"""Balancing losses that a run adds to the step's are those of steps that add them, in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron import MegatronStrategy
from tests.experts.expert_scenarios import fit
from tests.harness import one_process, run_trainers

WIDE = pytest.mark.wide
TWO: dict[str, Any] = {"expert_parallel_size": 2}
PIPE: dict[str, Any] = {"expert_parallel_size": 2, "pipeline_parallel_size": 2, "micro_batch_size": 2}
LOSS: dict[str, Any] = {"expert_balance": {"loss": 0.3}}
ROWS: list[Any] = [
    ("summing", "unbalanced", 4, {**PIPE, **LOSS}),
    ("asking_step", "asking_left", 2, {**TWO, "expert_balance": "loss"}),
    *(
        pytest.param(*row, marks=WIDE)
        for row in (
            ("summing", "unbalanced", 1, LOSS),
            ("summing", "unbalanced", 2, {**LOSS, "micro_batch_size": 4}),
            ("summing", "unbalanced", 2, {**LOSS, "tensor_parallel_size": 2}),
            ("summing_by_sequence", "unbalanced", 2, {**TWO, "expert_balance": {"loss": 0.3, "scope": "sequence"}}),
            ("summing_by_sequence", "unbalanced", 4, {**PIPE, "expert_balance": {"loss": 0.3, "scope": "sequence"}}),
            ("asking_step", "asking_labels", 2, {**TWO, "expert_balance": "loss"}),
            ("asking_step", "asking_labels", 1, {"expert_balance": {"loss": 0.5}}),
            ("asking_step", "asking_left", 4, {**PIPE, "expert_balance": {"loss": 0.5}}),
            ("asking_step", "asking_left", 2, {"pipeline_parallel_size": 2, "expert_balance": "loss"}),
        )
    ),
]


@pytest.mark.wide
@pytest.mark.parametrize(("written", "name", "devices", "options"), ROWS, ids=str)
def test_an_added_balancing_loss_is_that_of_a_step_that_adds_it(written, name, devices, options):
    expected = one_process(fit, written, None, {})
    for outcome in run_trainers(fit, name, options, {}, devices=devices):
        near = 1e-9 if written.startswith("summing") else 1e-6  # Hugging Face counts in float32
        for key, value in outcome.value["weights"].items():
            torch.testing.assert_close(value, expected["weights"][key], rtol=near, atol=near, msg=key)


@pytest.mark.parametrize(
    ("name", "balance", "wanted"),
    [
        ("words", "loss", "found no mixture of experts whose balancing loss is known"),
        ("asking_left", {"loss": 0.1, "scope": "sequence"}, "is not a loss that `net` computes"),
        ("summing", "loss", "`training_step` makes a balancing loss by `router_losses` itself"),
    ],
)
def test_losses_that_cannot_be_added_are_refused(name, balance, wanted):
    for outcome in run_trainers(fit, name, {"expert_balance": balance}, {}, devices=1, check=False):
        assert wanted in str(outcome.error)


@pytest.mark.parametrize("value", ["losses", {"loss": -1}, {"loss": 0.1, "scope": "step"}, {"bias": "x"}, 3, {}])
def test_values_that_mean_nothing_are_refused(value):
    with pytest.raises(ValueError, match="must be None, 'replica', 'bias' or"):
        MegatronStrategy(expert_balance=value)
