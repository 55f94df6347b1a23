"""The reference decoder gives one process's losses and weights over every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_trainers
from tests.harness.remember import remembered
from tests.models.scenarios import train


@remembered
def _alone(config: str) -> Any:
    return run_trainers(train, config, {"micro_batch_size": 2}, devices=1)[0].value


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("config", "sizes", "devices"),
    [
        ("llama", {"pipeline_parallel_size": 2}, 2),
        ("llama", {"tensor_parallel_size": 2}, 2),
        ("gpt", {"tensor_parallel_size": 2}, 2),
        ("palm", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 4),
        ("prmoe", {"data_parallel_size": 2, "expert_parallel_size": 2}, 2),
        pytest.param("prmoe", {"pipeline_parallel_size": 2, "expert_parallel_size": 2}, 4, marks=pytest.mark.wide),
        pytest.param("prmoe", {"tensor_parallel_size": 2}, 2, marks=pytest.mark.wide),
        pytest.param("gpt", {"pipeline_parallel_size": 2}, 2, marks=pytest.mark.wide),
        pytest.param("llama", {"tensor_parallel_size": 4}, 4, marks=pytest.mark.wide),
        pytest.param("llama", {"tensor_parallel_size": 2, "sequence_parallel": True}, 2, marks=pytest.mark.wide),
        pytest.param("palm", {"tensor_parallel_size": 2, "data_parallel_size": 2}, 4, marks=pytest.mark.wide),
    ],
)
def test_a_decoder_trains_as_in_one_process(config: str, sizes: dict[str, Any], devices: int) -> None:
    micro_batch = 1 if sizes.get("data_parallel_size", 1) > 1 else 2
    outcomes = run_trainers(train, config, {**sizes, "micro_batch_size": micro_batch}, devices=devices)
    losses, weights = _alone(config)
    assert len(set(losses)) == 4
    for outcome in outcomes:
        assert outcome.value[0] == pytest.approx(losses, abs=1e-9)
    got = outcomes[0].value[1]
    assert got.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(got[name], weight, atol=1e-8, rtol=0, msg=name)
