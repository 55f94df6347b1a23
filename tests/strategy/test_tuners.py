"""Lightning's tuners, its pruning and its ThroughputMonitor do what they do in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_trainers
from tests.harness.trainers import one_process
from tests.strategy.tuner_scenarios import FLOPS, rates, tuned, tuned_by_a_tuner

WIDE = pytest.mark.wide
LAYOUTS = [
    pytest.param((1, 2, 1), id="dp2"),
    pytest.param((2, 1, 1), id="pp2"),
    pytest.param((1, 1, 2), id="tp2", marks=WIDE),
]


def expect_those_of_one_process(kind: str, sizes: tuple[int, int, int], sharding: bool = True) -> None:
    found, weights = one_process(tuned, kind, None)
    outcomes = run_trainers(tuned, kind, sizes, sharding, devices=sizes[0] * sizes[1] * sizes[2])
    for outcome in outcomes:
        assert outcome.value[0] == pytest.approx(found, rel=1e-9)
    assert set(outcomes[0].value[1]) == set(weights)
    for name, value in outcomes[0].value[1].items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("kind", ["batch size", pytest.param("batch size, halved", marks=WIDE)])
def test_the_largest_batch_is_found_on_one_device(kind: str) -> None:
    expect_those_of_one_process(kind, (1, 1, 1))


def test_a_tuner_finds_batch_sizes_on_one_device() -> None:
    assert run_trainers(tuned_by_a_tuner, (1, 1, 1), devices=1)[0].value == one_process(tuned_by_a_tuner, None)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_the_learning_rate_found_is_that_of_one_process(sizes: tuple[int, int, int]) -> None:
    expect_those_of_one_process("learning rate", sizes)


@pytest.mark.parametrize(("kind", "sharding"), [("pruning", True), ("lottery", False)])
def test_replicas_are_pruned_as_one_process_is(kind: str, sharding: bool) -> None:
    expect_those_of_one_process(kind, (1, 2, 1), sharding)


def test_lottery_tickets_are_refused_where_replicas_share_out_the_update() -> None:
    for outcome in run_trainers(tuned, "lottery", (1, 2, 1), devices=2, check=False):
        assert "Pass `use_lottery_ticket_hypothesis=False`" in f"{outcome.error}{outcome.trace}{outcome.output}"


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_rates_count_a_sample_once_however_many_devices_share_it(sizes: Any) -> None:
    devices, replicas = sizes[0] * sizes[1] * sizes[2], sizes[1]
    rows = run_trainers(rates, sizes, devices=devices)[0].value
    assert rows
    for row in rows:
        rate, flops = row["train/device/samples_per_sec"], row["train/device/flops_per_sec"]
        assert row.get("train/samples_per_sec", rate) == pytest.approx(replicas * rate)
        assert row["train/device/mfu"] * FLOPS * devices / replicas == pytest.approx(flops)
