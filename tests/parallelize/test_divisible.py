"""Modules that compute a linear layer's product from other tensors than a weight are cut like one."""

from __future__ import annotations

import warnings
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.parallelize import explain
from lightning_megatron.parallelize.reading.divisible import Divisible, divisible
from tests.harness import run_ranks
from tests.parallelize.models import hugging_face
from tests.parallelize.test_low_rank import compare, random_ids

WIDTH, HEADS, BITS = 32, 4, 3


class Coded(nn.Module):
    """A weight of signs and scales; what it gives may be scaled further, by groups of two features."""

    signs: Tensor

    def __init__(self, wide: int, out: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = wide, out
        self.register_buffer("signs", torch.randint(0, 2, (BITS, out, wide), dtype=torch.int8) * 2 - 1)
        self.scale, self.groups = nn.Parameter(torch.rand(BITS, out)), nn.Parameter(torch.rand(wide // 2))
        self.bias = nn.Parameter(torch.rand(out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.scale[..., None] * self.signs).sum(0) * self.groups.repeat_interleave(2)
        return F.linear(x, weight.view(self.out_features, self.in_features), self.bias)


class Offset(Coded):
    """Gives what depends on the mean of all features of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.abs().mean(-1, keepdim=True))


class Interleaved(Coded):
    """An index of a code belongs to features that lie far apart."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., torch.arange(self.out_features).view(2, -1).T.flatten()]


class Noisy(Coded):
    """Drops features by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, training=self.training))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (Coded(WIDTH, WIDTH, bias) for bias in (True, False, True, True))
        self.up, self.down = Coded(WIDTH, 2 * WIDTH), Coded(2 * WIDTH, WIDTH)
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (self.q(h), self.k(h), self.v(h)))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, WIDTH), nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack().double().train()


def test_the_dims_of_each_tensor_that_go_with_features_are_found() -> None:
    by_output, by_input = {"scale": 1, "bias": 0, "signs": 1}, {"groups": 0, "signs": 2}
    assert divisible(Coded(8, 12)) == Divisible((8, 12), by_output, by_input, adds=True)
    assert divisible(Coded(8, 8, bias=False)) == Divisible((8, 8), {"scale": 1, "signs": 1}, by_input, adds=False)


@pytest.mark.parametrize("kind", [Offset, Interleaved, Noisy])
def test_a_product_whose_slices_compute_something_else_is_no_such_module(kind: type[Coded]) -> None:
    assert divisible(kind(8, 12)) is None


@pytest.mark.parametrize("module", [nn.Linear(8, 12), nn.LayerNorm(8), nn.Conv1d(8, 8, 1), nn.GRU(8, 8), nn.PReLU(8)])
def test_other_modules_are_not_taken_for_one(module: nn.Module) -> None:
    assert divisible(module) is None


def test_a_tensor_that_several_modules_have_stays_whole() -> None:
    module = stack()
    module.layers[1].up.scale = module.layers[0].up.scale
    report = explain(module, 2)
    kinds = {row.name: row.style for row in report.rows}
    assert report.spec("layers.0.up.scale").is_whole and "layers.0.up" not in kinds
    assert kinds["layers.0.q"] == "colwise" and kinds["layers.0.o"] == "rowwise"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@run_ranks(tensor=2)
def test_a_transformer_of_codes_matches_one_process(mesh: Any, sequence_parallel: bool) -> None:
    module = stack()
    compare(module, mesh, sequence_parallel=sequence_parallel)
    assert module.layers[0].q.signs.shape == (BITS, WIDTH // 2, WIDTH)
    assert module.layers[0].down.signs.shape == (BITS, WIDTH, WIDTH)


@run_ranks(tensor=2)
def test_outputs_of_codes_gathered_by_plan_match_one_process(mesh: Any) -> None:
    names = {f"layers.*.{name}": "colwise_gather_output" for name in ("q", "k", "v", "up")}
    compare(stack(), mesh, plan={**names, "layers.*.o": "rowwise_split_input", "layers.*.down": "rowwise_split_input"})


def scaled(heads: int = 4) -> nn.Module:
    options = {"feedforward_modules": ["down_proj"], "init_ia3_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], **options)
    with warnings.catch_warnings(action="ignore"):  # of names that PEFT reads from Transformers, deprecated there
        return peft.get_peft_model(hugging_face("llama", num_key_value_heads=heads), config).double().train()


@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@run_ranks(tensor=2)
def test_scaled_features_match_one_process(mesh: Any, sequence_parallel: bool, heads: int) -> None:
    compare(scaled(heads), mesh, ids=random_ids(), sequence_parallel=sequence_parallel)


def test_scaled_features_are_split_with_their_layers() -> None:
    report = explain(scaled(), 2)
    styles = {row.name.rpartition(".")[2]: row.style for row in report.rows}
    assert {styles[f"{name}_proj"] for name in ("q", "k", "v", "gate", "up")} == {"colwise"}
    assert {styles[f"{name}_proj"] for name in ("o", "down")} == {"rowwise"}
