"""What writes other weights on each replica is refused by name, and what writes the same trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_trainers
from tests.strategy import replica_scenarios as replicas

WIDE = pytest.mark.wide
LAYOUTS: list[Any] = [
    pytest.param((1, 2), {}, id="dp2"),
    pytest.param((1, 2), {"weight_sharding": {"free": "layer"}}, id="zero3", marks=WIDE),
    pytest.param((1, 2), {"optimizer_sharding": False, "micro_batch_size": 1}, id="unshared", marks=WIDE),
    pytest.param((1, 2), {"overlap_parameter_gather": True}, id="overlap", marks=WIDE),
    pytest.param((2, 2), {}, id="pp2xdp2", marks=WIDE),
]


@pytest.mark.parametrize(("layout", "arguments"), LAYOUTS)
@pytest.mark.parametrize("kind", ["OfBatch", "FirstRank"])
def test_weights_that_replicas_write_by_themselves_are_refused(layout, arguments, kind):
    devices = layout[0] * layout[1]
    for outcome in run_trainers(replicas.run, layout, arguments, kind, devices=devices, check=False, grace=20.0):
        said = f"{outcome.error}{outcome.trace}{outcome.output}"
        assert "`net.final_norm.weight` differs between the replicas" in said and "killed" not in said, said


def test_weights_that_a_step_writes_on_each_replica_by_itself_are_refused():
    for outcome in run_trainers(replicas.run, (1, 2), {}, "InStep", devices=2, check=False, grace=20.0):
        said = f"{outcome.error}{outcome.trace}{outcome.output}"
        assert "differs between the replicas" in said and "killed" not in said, said


@pytest.mark.parametrize(("layout", "arguments"), LAYOUTS)
@pytest.mark.parametrize("kind", [pytest.param("OfAll", marks=WIDE), "Noisy"])
def test_weights_that_all_replicas_write_alike_are_those_of_one_process(layout, arguments, kind):
    expected = run_trainers(replicas.run, None, {}, kind, devices=1)[0].value
    found = run_trainers(replicas.run, layout, arguments, kind, devices=layout[0] * layout[1])[0].value
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-9)


def test_weights_that_are_no_numbers_on_all_replicas_are_nobodys_own():
    arguments = {"nonfinite": "skip"}
    found = run_trainers(replicas.run, (1, 2), arguments, "Gone", devices=2)[0].value
    assert found.isnan().all()
