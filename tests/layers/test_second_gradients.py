"""Gradients of gradients through split layers and losses are those of whole ones, or an error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.mesh.autograd import differentiating_twice
from tests.harness import run_ranks
from tests.harness.twins import random_tensor, tensor_group

CLASSES = 11
TARGET = torch.tensor([0, 10, 3, 7])


def _layers() -> nn.ModuleDict:
    torch.manual_seed(3)
    pair = {"up": ColumnParallelLinear(6, 8), "down": RowParallelLinear(8, 6), "norm": nn.LayerNorm(6)}
    return nn.ModuleDict({**pair, "head": ColumnParallelLinear(6, CLASSES)}).double()


def _penalised(layers: nn.ModuleDict, smoothing: float) -> Tensor:
    """A loss with a penalty on the gradient of its input; leaves the gradients of the parameters."""
    x = random_tensor(4, 6, seed=5).double().requires_grad_()
    y = layers["norm"](x + layers["down"](torch.tanh(layers["up"](x))))
    losses = F.cross_entropy(layers["head"](y), TARGET, reduction="none", label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    total = losses.mean() + 3 * gradient.square().sum()
    total.backward()
    return total.detach()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@run_ranks(tensor=2)
def test_a_penalty_on_gradients_is_that_of_whole_layers(mesh, smoothing):
    whole, split = _layers(), _layers()
    group = tensor_group(mesh)
    specs = {}
    for name, options in (("up", {}), ("down", {}), ("head", {"output": "logits"})):
        specs |= {f"{name}.{leaf}": entry.spec for leaf, entry in split[name].shard_(group, **options).items()}
    wanted = _penalised(whole, smoothing)
    with differentiating_twice:
        torch.testing.assert_close(_penalised(split, smoothing), wanted, rtol=1e-12, atol=1e-12)
    for (name, found), other in zip(split.named_parameters(), whole.parameters(), strict=True):
        expected = specs[name].slice_full(other.grad) if name in specs else other.grad
        torch.testing.assert_close(found.grad, expected, rtol=1e-12, atol=1e-12)


@run_ranks(tensor=2)
def test_without_being_asked_split_layers_refuse_to_be_differentiated_twice(mesh):
    split = _layers()
    split["head"].shard_(tensor_group(mesh), output="logits")
    with pytest.raises(RuntimeError, match="a gradient of a gradient"):
        _penalised(split, 0.0)
