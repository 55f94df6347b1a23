"""Experts shared out over context ranks, which split each sequence, train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.experts.expert_scenarios import fit
from tests.experts.families import FAMILIES, FURTHER
from tests.experts.load_scenarios import loads
from tests.experts.strangers import EXACT
from tests.harness import one_process, run_trainers

WIDE = pytest.mark.wide
C2: dict[str, Any] = {"context_parallel_size": 2}
C2E2: dict[str, Any] = {**C2, "expert_parallel_size": 2}
PIPE: dict[str, Any] = {**C2E2, "pipeline_parallel_size": 2, "micro_batch_size": 2}
KINDS = [name for name in EXACT if name not in ("bytoken", "sequences", "registry", "loop")]
ROWS: list[Any] = [
    ("attending_selected", 2, C2E2, {}),
    ("attending_loop", 4, {**C2, "expert_parallel_size": 4}, {"accumulate_grad_batches": 2}),
    *(
        pytest.param(*row, marks=WIDE)
        for row in (
            *((f"attending_{name}", 2, C2E2, {}) for name in KINDS),
            *((family, 2, C2E2, {}) for family in (*FAMILIES, *FURTHER) if family not in ("Jamba", "Phimoe")),
            ("attending_drop_in", 2, C2E2, {}),
            ("drop_in", 4, {**C2, "expert_parallel_size": 4}, {}),
            ("balanced_Mixtral", 2, C2E2, {}),
            ("tight", 2, C2E2, {}),
            ("watched", 2, C2E2, {}),
            ("attending_pushed", 4, C2E2, {"accumulate_grad_batches": 2}),
            ("attending_selected", 4, {**C2E2, "weight_sharding": True}, {}),
            ("attending_selected", 4, {**C2E2, "optimizer_sharding": False}, {}),
            ("attending_selected", 4, {**C2E2, "tensor_parallel_size": 2}, {}),
            ("Qwen3Moe", 4, {**C2, "expert_parallel_size": 4, "tensor_parallel_size": 2}, {}),
            ("attending_selected", 4, {**C2E2, "tensor_parallel_size": 2, "sequence_parallel": True}, {}),
            ("attending_selected", 4, {**PIPE, "pipeline_schedule": "zb-v", "activation_recompute": "full"}, {}),
            ("attending_loop", 4, PIPE, {}),
            ("attending_drop_in", 4, PIPE, {}),
        )
    ),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("name", "devices", "options", "trainer"), ROWS, ids=str)
def test_training_over_context_ranks_is_that_of_one_process(name, devices, options, trainer):
    expected = one_process(fit, name, None, trainer)
    found = [outcome.value for outcome in run_trainers(fit, name, options, trainer, devices=devices)]
    within = 1e-6 if name.startswith("balanced") or name in FURTHER else 1e-9  # routers in float32
    close = 4e-9 if name in FAMILIES else 1e-9  # norms and softmax in float32 too; measured up to 2.5e-9
    torch.testing.assert_close(found[0]["weights"], expected["weights"], rtol=0.0, atol=max(within / 10, close))
    for value in found:
        assert value["losses"] == pytest.approx(expected["losses"], rel=within)
        assert value["share"] < 0.7


@pytest.mark.everyday(1)
@pytest.mark.parametrize("options", [C2E2, pytest.param({}, marks=WIDE), pytest.param({"micro_batch_size": 2})])
@pytest.mark.parametrize("name", ["words", "strange_loop", "strange_dense"])
def test_the_load_over_context_ranks_is_that_of_one_process(name, options):
    expected = run_trainers(loads, name, {}, {}, devices=1)[0].value
    for outcome in run_trainers(loads, name, {**C2, **options}, {}, devices=2):
        assert outcome.value["load"] == expected["load"]


def test_biases_over_context_ranks_are_those_of_one_process():
    options = {"expert_balance": "bias"}
    expected = run_trainers(fit, "biased", options, devices=1)[0].value
    found = run_trainers(fit, "biased", {**options, **C2E2}, devices=2)[0].value
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0.0, atol=1e-9)
