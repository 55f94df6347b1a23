"""Experts whose matrices are cut over several ranks train as in one process, and what cannot be cut is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.experts.expert_scenarios import fit
from tests.experts.families import FAMILIES, FURTHER, IN_FLOAT32, UNCUT
from tests.experts.strangers import EXACT
from tests.harness import one_process, run_trainers

WIDE = pytest.mark.wide
HALVES: dict[str, Any] = {"expert_tensor_parallel_size": 2}
BOTH: dict[str, Any] = {**HALVES, "expert_parallel_size": 2}
PIPE: dict[str, Any] = {**HALVES, "pipeline_parallel_size": 2, "micro_batch_size": 2}
ROWS: list[Any] = [
    ("words", 2, HALVES, {"accumulate_grad_batches": 2}),
    ("words", 4, BOTH, {}),
    ("GptOss", 2, HALVES, {}),
    *(
        pytest.param(*row, marks=WIDE)
        for row in (
            *((f"strange_{name}", 2, HALVES, {}) for name in EXACT if name not in ("sorted", "halves", "groups")),
            *((family, 2, HALVES, {}) for family in (*FAMILIES, *FURTHER) if family not in UNCUT),
            ("drop_in", 4, {**BOTH, "tensor_parallel_size": 2}, {}),
            ("starved", 4, BOTH, {}),
            ("watched", 4, BOTH, {}),
            ("watched", 2, {**HALVES, "tensor_parallel_size": 2}, {}),
            ("Mixtral", 4, {**HALVES, "tensor_parallel_size": 2}, {}),
            ("Mixtral", 4, {**BOTH, "tensor_parallel_size": 2, "sequence_parallel": True}, {}),
            ("Qwen3Moe", 4, {**BOTH, "context_parallel_size": 2}, {}),
            ("words", 4, {**BOTH, "optimizer_sharding": False}, {}),
            ("words", 4, {**HALVES, "weight_sharding": True}, {}),
            ("GptOss", 4, {**HALVES, "weight_sharding": True}, {}),
            *(
                ("words", 4, {**PIPE, "pipeline_schedule": name}, {"accumulate_grad_batches": 1 + index % 2})
                for index, name in enumerate(("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v"))
            ),
            ("GptOss", 4, {**PIPE, "pipeline_schedule": "zb-h1", "activation_recompute": "full"}, {}),
            ("strange_switch", 4, {**PIPE, "pipeline_schedule": "zb-v"}, {}),
            ("strange_switch", 4, {**PIPE, "activation_recompute": "full"}, {}),
        )
    ),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("name", "devices", "options", "trainer"), ROWS, ids=str)
def test_training_is_that_of_one_process(name, devices, options, trainer):
    expected = one_process(fit, name, None, trainer)
    found = [outcome.value for outcome in run_trainers(fit, name, options, trainer, devices=devices)]
    for value in found:
        assert value["losses"] == pytest.approx(expected["losses"], rel=1e-6 if name in IN_FLOAT32 else 1e-10)
    if name in ("words", "starved", "watched"):
        stages, ranks = options.get("pipeline_parallel_size", 1), 2 * options.get("expert_parallel_size", 1)
        assert {value["share"] for value in found} == {1 / (ranks * stages)}
    near = 1e-6 if name in IN_FLOAT32 else 1e-9
    assert set(found[0]["weights"]) == set(expected["weights"])
    for key, value in found[0]["weights"].items():
        torch.testing.assert_close(value, expected["weights"][key], rtol=near, atol=near, msg=key)


CHAINS: list[Any] = [
    [(2, HALVES), (2, {"expert_parallel_size": 2}), (1, {})],
    pytest.param([(4, BOTH), (2, {}), (4, PIPE)], marks=WIDE),
    pytest.param([(1, {}), (4, BOTH), (4, {"expert_tensor_parallel_size": 4})], marks=WIDE),
]


@pytest.mark.wide
@pytest.mark.parametrize("chain", CHAINS, ids=str)
@pytest.mark.parametrize("name", ["words", pytest.param("GptOss", marks=WIDE), pytest.param("drop_in", marks=WIDE)])
def test_a_checkpoint_goes_on_with_its_experts_cut_otherwise(name, chain, tmp_path):
    expected, before, outcomes = one_process(fit, name, None, {}, 2 * len(chain)), "", []
    for part, (devices, options) in enumerate(chain):
        saved = str(tmp_path / f"{part}.ckpt")
        outcomes = run_trainers(fit, name, options, {}, 2 * part + 2, before, saved, devices=devices)
        before = saved
    for key, value in outcomes[0].value["weights"].items():
        torch.testing.assert_close(value, expected["weights"][key], rtol=1e-9, atol=1e-9, msg=key)


REFUSED: list[Any] = [
    ("strange_normed", 2, HALVES, "no cut was found whose parts add up to it"),
    *(
        pytest.param(*row, marks=WIDE)
        for row in (
            ("strange_sorted", 2, HALVES, "no cut was found whose parts add up to it"),
            ("strange_odd", 2, HALVES, "its inner width (15) is not divisible by 2"),
            ("words", 2, BOTH, "times `expert_tensor_parallel_size=2` does not divide the 2 ranks of a stage"),
            ("whole_updates", 2, HALVES, "use an optimizer that updates every element"),
            ("dense", 2, HALVES, "none were found that can be"),
        )
    ),
]


@pytest.mark.parametrize(("name", "devices", "options", "wanted"), REFUSED, ids=str)
def test_experts_that_cannot_be_cut_are_refused_on_every_rank(name, devices, options, wanted):
    for outcome in run_trainers(fit, name, options, {}, devices=devices, check=False, grace=20.0):
        assert wanted in str(outcome.error), outcome
