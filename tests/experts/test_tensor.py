"""Experts shared out over tensor ranks and replicas train as in one process, in every shape of the grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.experts.expert_scenarios import fit
from tests.experts.families import FAMILIES, FURTHER
from tests.experts.strangers import EXACT
from tests.harness import one_process, run_trainers

WIDE = pytest.mark.wide
T2E2: dict[str, Any] = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
SHARDS: dict[str, Any] = {**T2E2, "sequence_parallel": True}
PIPE: dict[str, Any] = {**T2E2, "pipeline_parallel_size": 2, "micro_batch_size": 2}
KINDS = [name for name in EXACT if name not in ("bytoken", "sequences", "registry")]
ROWS: list[Any] = [
    ("attending_selected", 2, T2E2, {}),
    ("attending_sorted", 2, SHARDS, {}),
    ("attending_pushed", 4, {"tensor_parallel_size": 2, "expert_parallel_size": 4}, {}),
    ("attending_loop", 4, {**PIPE, **SHARDS, "pipeline_schedule": "zb-v"}, {}),
    *(
        pytest.param(*row, marks=WIDE)
        for row in (
            *((f"attending_{name}", 2, T2E2, {}) for name in KINDS),
            *((f"attending_{name}", 2, SHARDS, {}) for name in ("selected", "pushed", "loop", "masked")),
            *((family, 2, T2E2, {}) for family in (*FAMILIES, *FURTHER)),
            *((family, 2, SHARDS, {}) for family in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss")),
            ("words", 2, T2E2, {}),
            ("attending_dropped", 2, {**T2E2, "micro_batch_size": 4}, {}),
            ("attending_balanced", 2, T2E2, {}),
            ("attending_drop_in", 2, T2E2, {}),
            ("attending_selected", 4, T2E2, {"accumulate_grad_batches": 2}),
            ("attending_loop", 4, {**T2E2, "optimizer_sharding": False}, {}),
            ("attending_selected", 4, {**T2E2, "weight_sharding": True}, {}),
            ("attending_selected", 4, {**SHARDS, "optimizer_sharding": {"shard": 2}}, {}),
            ("attending_loop", 4, {**SHARDS, "expert_parallel_size": 4, "activation_recompute": "full"}, {}),
            (
                "attending_selected",
                4,
                {"tensor_parallel_size": 2, "expert_parallel_size": 4, "micro_batch_size": 3},
                {},
            ),
            *(
                ("attending_selected", 4, {**PIPE, "pipeline_schedule": name}, {"accumulate_grad_batches": 1 + n % 2})
                for n, name in enumerate(("1f1b", "interleaved", "zb-h1", "zb-v"))
            ),
            ("balanced_Mixtral", 4, {**PIPE, "pipeline_schedule": "zb-v", "activation_recompute": "full"}, {}),
            ("Qwen3Moe", 4, {**PIPE, **SHARDS}, {}),
            ("DeepseekV3", 4, {**T2E2, "expert_parallel_size": 4}, {}),
            ("GptOss", 4, {**PIPE, "pipeline_schedule": "zb-h1", "activation_recompute": "full"}, {}),
            ("balanced_Qwen3Moe", 4, {**PIPE, "pipeline_schedule": "interleaved"}, {}),
            ("balanced_Olmoe", 4, {**T2E2, "expert_parallel_size": 4}, {}),
            ("watched", 2, T2E2, {}),
            ("watched", 4, {**T2E2, "optimizer_sharding": False}, {}),
            ("watched", 4, {**T2E2, "expert_parallel_size": 4, "weight_sharding": True}, {}),
            ("watched", 4, {"tensor_parallel_size": 4, "expert_parallel_size": 2}, {}),
            ("attending_drop_in", 2, SHARDS, {}),
        )
    ),
]


def _narrow(name: str) -> bool:
    """Whether something in it computes in 32 bits, as norms and routers of Hugging Face's models do."""
    return name in FAMILIES or name in FURTHER or name.startswith("balanced")


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("name", "devices", "options", "trainer"), ROWS, ids=str)
def test_training_is_that_of_one_process(name, devices, options, trainer):
    expected = one_process(fit, name, None, trainer)
    found = [outcome.value for outcome in run_trainers(fit, name, options, trainer, devices=devices)]
    for value in found:
        assert value["losses"] == pytest.approx(expected["losses"], rel=1e-6 if _narrow(name) else 1e-10)
        stages, ranks = options.get("pipeline_parallel_size", 1), options["expert_parallel_size"]
        if name in ("attending_selected", "attending_pushed", "attending_loop", "attending_drop_in"):
            assert value["share"] == 1 / (stages * ranks)
    assert set(found[0]["weights"]) == set(expected["weights"])
    near = 1e-6 if _narrow(name) else 1e-9
    for key, value in found[0]["weights"].items():
        torch.testing.assert_close(value, expected["weights"][key], rtol=near, atol=near, msg=key)


T2E4: dict[str, Any] = {"tensor_parallel_size": 2, "expert_parallel_size": 4}
CHAINS: list[Any] = [
    [(2, T2E2), (2, {"expert_parallel_size": 2}), (1, {})],
    pytest.param([(4, T2E4), (4, {**PIPE, "pipeline_schedule": "zb-v"}), (2, {"tensor_parallel_size": 2})], marks=WIDE),
    pytest.param([(2, {}), (4, {**SHARDS, "optimizer_sharding": False}), (4, T2E4)], marks=WIDE),
]


@pytest.mark.wide
@pytest.mark.parametrize("chain", CHAINS, ids=str)
@pytest.mark.parametrize("name", ["attending_sorted", pytest.param("attending_selected", marks=WIDE)])
def test_a_checkpoint_goes_on_in_another_grid(name, chain, tmp_path):
    expected = one_process(fit, name, None, {}, 2 * len(chain))
    before = ""
    for part, (devices, options) in enumerate(chain):
        saved, steps = str(tmp_path / f"{part}.ckpt"), 2 * part + 2
        found = run_trainers(fit, name, options, {}, steps, before, saved, devices=devices)[0].value
        before = saved
    for key, value in found["weights"].items():
        torch.testing.assert_close(value, expected["weights"][key], rtol=1e-9, atol=1e-9, msg=key)


REFUSED: list[Any] = [
    ("attending_selected", {**T2E2, "expert_parallel_size": 3}, "does not divide the 2 ranks of a stage"),
    pytest.param(
        "attending_loop",
        {**T2E2, "tensor_parallel_plan": {"layers.*.mixture.experts.*.0": "colwise"}},
        "`tensor_parallel_plan` names 'layers.0.mixture.experts.0.0'",
        marks=WIDE,
    ),
    pytest.param("attending_dropped", SHARDS, "depends on the others of the batch", marks=WIDE),
    pytest.param("attending_chained", T2E2, "depends on what another one has answered", marks=WIDE),
]


@pytest.mark.parametrize(("name", "options", "wanted"), REFUSED, ids=str)
def test_what_cannot_be_shared_out_is_refused_on_every_rank(name, options, wanted):
    for outcome in run_trainers(fit, name, options, {}, devices=2, check=False, grace=20.0):
        assert wanted in str(outcome.error), outcome
