"""Sharded linears leave their weight gradients to the second half of a split backward, as whole ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.layers import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.pipeline.weight_gradients import Factors, WeightGradients, add_up
from tests.harness import run_ranks


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
