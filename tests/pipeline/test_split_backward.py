"""Sharded linears leave their weight gradients to the second half of a split backward, as whole ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.layers import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.pipeline.forwards.factors import Factors, add_up
from lightning_megatron.pipeline.forwards.weight_gradients import WeightGradients
from tests.harness import run_ranks, run_trainers
from tests.pipeline.split_scenarios import MICRO_BATCHES, counted


class Pair(nn.Module):
    """Two column-parallel linears that read one tensor, and the row-parallel one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = ColumnParallelLinear(6, 8), ColumnParallelLinear(6, 8, bias=False)
        self.down = RowParallelLinear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def make(mesh: Any, gather: int | None) -> tuple[Pair, Tensor]:
    torch.manual_seed(3)
    pair, x = Pair().double(), torch.randn(2, 4, 6, dtype=torch.float64)
    if gather is not None:
        x = x.chunk(2, gather)[mesh["tensor_parallel"].get_local_rank()].contiguous()
    entry = pair_entry(mesh, gather)
    pair.gate.shard_(mesh["tensor_parallel"], entry=entry)
    pair.up.shard_(mesh["tensor_parallel"], entry=entry)
    pair.down.shard_(mesh["tensor_parallel"], scatter_dim=gather)
    return pair, x.requires_grad_()


def pair_entry(mesh: Any, gather: int | None) -> Any:
    from lightning_megatron.layers.linear import ColumnEntry

    return ColumnEntry(mesh["tensor_parallel"].get_group(), gather_dim=gather)


@pytest.mark.parametrize("gather", [None, 1], ids=["replicated", "sequence"])
@run_ranks(tensor=2)
def test_both_halves_together_are_one_backward_of_sharded_linears(mesh: Any, gather: int | None) -> None:
    pair, x = make(mesh, gather)
    pair(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in pair.named_parameters()}
    split_pair, y = make(mesh, gather)
    seen: list[str] = []
    for name, parameter in split_pair.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    split, queue = WeightGradients([split_pair]), list[Factors]()
    with split.installed(), split.putting_off(queue):
        split_pair(y).square().sum().backward()
    assert y.grad is not None and torch.allclose(y.grad, x.grad, atol=1e-12)
    assert len(queue) == 3 and split_pair.gate.weight.grad is None and seen == ["down.bias"]
    add_up(queue)
    assert sorted(seen) == sorted(expected), "every hook ran once"
    for name, parameter in split_pair.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=1e-12), name
    assert all("put_off" not in module.__dict__ for module in split_pair.modules())


# Linears of a layer; in torch's attention, the packed projection is one product on one rank and three on several.
LINEARS = {"nano": (4, 4), "gpt2": (4, 4), "llama": (7, 7), "torch": (4, 6)}
IN_TRAINER = [
    ("gpt2", 1, "zb-v", "full"),
    ("llama", 2, "zb-h1", None),
    ("torch", 2, "zb-v", "full"),
    *(
        pytest.param(model, tensor, schedule, recompute, marks=pytest.mark.wide)
        for model in LINEARS
        for tensor in (1, 2)
        for schedule, recompute in (("zb-h1", "full"), ("zb-v", None), ("zb-h2", {"every": 1}), ("dualpipe-v", None))
    ),
]


@pytest.mark.parametrize(("model", "tensor", "schedule", "recompute"), IN_TRAINER)
def test_every_linear_of_a_trunk_is_put_off_and_user_code_runs_once(
    model: str, tensor: int, schedule: str, recompute: Any
) -> None:
    outcomes = run_trainers(counted, model, tensor, schedule, recompute, devices=2 * tensor)
    for outcome in outcomes:
        found = outcome.value
        waited_for = found["stage"] > 0 or schedule.endswith("-v")  # a whole backward where nobody waits for its half
        assert found["per_layer"] == ([LINEARS[model][tensor - 1]] if waited_for else []), found
        assert found["early"] == [], "no linear has a weight gradient after the first half"
        layers = len(found["forwards"])
        tries = 3  # of two micro-batches, and of both at once, as user code runs in their backwards
        assert found["backwards"] == layers * (MICRO_BATCHES + tries), found
        inside = tensor == 1  # a hook on the layer itself is not of what is computed again
        runs = 2 * MICRO_BATCHES if recompute is not None and inside else MICRO_BATCHES  # once, and once again at most
        assert set(found["forwards"].values()) == {runs}, found  # a trial takes back what it has counted
