"""Reductions of what is logged, over two ranks: what Lightning's strategies compute, without the barrier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.strategy.lightning.distributed import reduce
from tests.harness import run_ranks


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("mean", 2.5), ("avg", 2.5), ("MEAN", 2.5), ("sum", 5.0), (None, 5.0), ("max", 4.0), ("min", 1.0)],
)
@run_ranks(data=2)
def test_a_number_of_each_rank_is_reduced(mesh: DeviceMesh, operation: Any, expected: float) -> None:
    group = mesh["data_parallel"].get_group()
    number = torch.tensor([1.0, 4.0][group.rank()])
    assert reduce(number, group, operation) is number
    assert number == expected


@pytest.mark.parametrize("whole", [False, True], ids=["fractions", "integers"])
@run_ranks(data=2)
def test_torchs_own_operations_and_integers_are_known(mesh: DeviceMesh, whole: bool) -> None:
    group = mesh["data_parallel"].get_group()
    numbers = torch.tensor([2, 6]) if whole else torch.tensor([2.0, 6.0])
    for operation, expected in ((distributed.ReduceOp.AVG, 4), (distributed.ReduceOp.MAX, 6)):
        assert reduce(numbers[group.rank()].clone(), group, operation) == expected
