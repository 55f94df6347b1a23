"""Replicas that share out experts may call them a different number of times in evaluation, and never in training."""

from __future__ import annotations

from typing import Any

import pytest

from tests.experts.text_scenarios import continued, trained
from tests.harness import one_process, run_trainers

WIDE = pytest.mark.wide
TWO: dict[str, Any] = {"expert_parallel_size": 2}
PIPE: dict[str, Any] = {"expert_parallel_size": 2, "pipeline_parallel_size": 2}
OWN: dict[str, Any] = {"whole_batch_loss": False}  # a mean over tokens whose number the first sample tells


@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [
        ("loop", 2, TWO),
        pytest.param("loop", 2, {**TWO, "expert_dispatch": "all_gather"}, marks=WIDE),
        pytest.param("list", 2, TWO, marks=WIDE),
        pytest.param("generate", 2, {**TWO, **OWN}, marks=WIDE),
        pytest.param("loop", 4, PIPE, marks=WIDE),
        pytest.param("list", 4, PIPE, marks=WIDE),
        pytest.param("generate", 4, {**PIPE, **OWN}, marks=WIDE),
    ],
    ids=str,
)
def test_texts_of_different_lengths_are_those_of_one_process(name, devices, options):
    expected = [one_process(continued, name, None, replica) for replica in range(2)]
    lengths = [[len(each[0]) for each in seen] for seen, _ in expected]
    assert lengths[0] != lengths[1]
    for rank, outcome in enumerate(run_trainers(continued, name, options, devices=devices)):
        seen, mean = outcome.value
        assert seen == expected[rank % 2][0]
        assert mean == pytest.approx((expected[0][1] + expected[1][1]) / 2)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("depends", "call `layers.1.experts` and `layers.2.experts` at once"),
        ("ends", "and another one has ended its step"),
    ],
)
def test_layers_that_depend_on_a_replica_s_samples_are_refused_by_name(name, wanted):
    for outcome in run_trainers(trained, name, TWO, devices=2, check=False, grace=20.0):
        assert wanted in str(outcome.error)
