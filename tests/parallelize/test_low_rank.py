"""Linear layers with low-rank updates beside them are split as one, and train as in one process."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.parallelize import explain, parallelize
from lightning_megatron.parallelize.reading.kinds import behaves_like_linear
from lightning_megatron.parallelize.reading.low_rank import LowRank, low_rank
from tests.harness import run_ranks
from tests.harness.twins import (
    EXACT,
    assert_same_gradients,
    random_tensor,
    reduce_partial_gradients,
    tensor_group,
)
from tests.parallelize.models import VOCABULARY, hugging_face

WIDTH, HEADS, RANK = 32, 4, 3


class Updated(nn.Module):
    """A linear layer with an update of low rank, as one writes it by hand."""

    def __init__(self, base: nn.Linear, dropout: float = 0.0, rank: int = RANK) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(self.dropout(x)))


class Gated(Updated):
    """No linear layer: the update scales what it is added to."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * torch.sigmoid(self.up(self.down(x)))


class Normalised(Updated):
    """No sum over parts of the input: divides by norms, which it gets by calling its layers on a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        update = 2 * self.up(self.down(torch.eye(self.base.in_features, dtype=x.dtype))).T
        return super().forward(x) / (self.base.weight + update).norm(dim=1).detach()


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q, self.v, self.o = (Updated(layer, dropout) for layer in (self.q, self.v, self.o))
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(dropout)
        self.up, self.down = (
            Updated(nn.Linear(WIDTH, 2 * WIDTH), dropout),
            Updated(nn.Linear(2 * WIDTH, WIDTH), dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, WIDTH), nn.ModuleList(Layer(dropout) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def stack(dropout: float = 0.0) -> Stack:
    torch.manual_seed(0)
    return Stack(dropout).double().train()


def test_what_computes_a_low_rank_update_is_recognised_whatever_it_is_called() -> None:
    assert low_rank(Updated(nn.Linear(8, 12))) == LowRank("base", ("down",), ("up",))
    assert low_rank(Gated(nn.Linear(8, 12))) is None
    assert low_rank(nn.Linear(8, 12)) is None and low_rank(stack()) is None
    assert low_rank(nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8), nn.Linear(8, 12))) is None


def test_a_plan_names_the_parts_of_an_updated_layer() -> None:
    report = explain(stack(), 2)
    shapes = {name.removeprefix("layers.0."): report.spec(name).local_shape for name in report.parameters}
    assert shapes["attention.q.base.weight"] == (WIDTH // 2, WIDTH) and shapes["attention.q.up.weight"] == (
        WIDTH // 2,
        RANK,
    )
    assert shapes["attention.q.down.weight"] == (RANK, WIDTH) and shapes["attention.o.up.weight"] == (WIDTH, RANK)
    assert shapes["attention.o.down.weight"] == (RANK, WIDTH // 2) and shapes["down.base.weight"] == (WIDTH, WIDTH)
    assert report.partial_gradients == [] and "gathered" not in report.explain()
    split = explain(stack(), 2, sequence_parallel=True).partial_gradients
    assert {"layers.0.attention.q.down.weight", "layers.0.attention.o.up.weight"} <= set(split)
    assert "layers.0.attention.q.up.weight" not in split


@pytest.mark.parametrize("sequence_parallel", [False, True])
@run_ranks(tensor=2)
def test_an_updated_transformer_matches_one_process(mesh: Any, sequence_parallel: bool) -> None:
    compare(stack(), mesh, sequence_parallel=sequence_parallel)


@run_ranks(tensor=2)
def test_outputs_gathered_by_plan_match_one_process(mesh: Any) -> None:
    names = {f"attention.{name}": "colwise_gather_output" for name in "qkv"}
    compare(stack(), mesh, plan={**names, "attention.o": "rowwise_split_input", "layers.*.up": "colwise_gather_output"})


@run_ranks(tensor=2)
def test_dropout_before_an_update_is_the_same_on_every_rank(mesh: Any) -> None:
    module = stack(dropout=0.5)
    parallelize(module, mesh)
    module(torch.arange(10).view(2, 5)).square().sum().backward()
    for name, parameter in module.named_parameters():
        if name.endswith(("q.down.weight", "v.down.weight", "0.up.down.weight", "o.up.weight")):
            first = parameter.grad.clone()
            torch.distributed.broadcast(first, 0, group=tensor_group(mesh))
            torch.testing.assert_close(parameter.grad, first, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


ADAPTERS = {
    "some": {"target_modules": ["q_proj", "v_proj"]},
    "all": {"target_modules": "all-linear"},
    "kept head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "vocabulary": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "odd vocabulary": {"target_modules": ["q_proj", "lm_head"]},
    "weight-decomposed": {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
    "weight-decomposed, all": {"target_modules": "all-linear", "use_dora": True},
    "weight-decomposed, biased": {"target_modules": "all-linear", "use_dora": True},
}


def adapted(kind: str, **more: Any) -> nn.Module:
    options = {"init_lora_weights": False, "task_type": "CAUSAL_LM", **ADAPTERS[kind], **more}
    with warnings.catch_warnings(
        action="ignore"
    ):  # of names that PEFT reads from Transformers, which are deprecated there
        biased = {"attention_bias": "biased" in kind, "mlp_bias": "biased" in kind}
        base = hugging_face("llama", **biased, vocab_size=VOCABULARY + ("odd" in kind))
        return peft.get_peft_model(base, peft.LoraConfig(r=4, **options)).double().train()


@pytest.mark.everyday(2)
@pytest.mark.parametrize("kind", ADAPTERS)
@run_ranks(tensor=2)
def test_a_model_with_adapters_matches_one_process(mesh: Any, kind: str) -> None:
    compare(adapted(kind), mesh, ids=random_ids())


@run_ranks(tensor=2)
def test_a_model_with_adapters_and_sequence_shards_matches_one_process(mesh: Any) -> None:
    compare(adapted("all"), mesh, ids=random_ids(), sequence_parallel=True)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("kind", ["weight-decomposed", "weight-decomposed, all"])
@run_ranks(tensor=2)
def test_weight_decomposed_layers_with_sequence_shards_match_one_process(mesh: Any, kind: str) -> None:
    compare(adapted(kind), mesh, ids=random_ids(), sequence_parallel=True)


@run_ranks(tensor=2)
def test_layers_called_with_what_has_no_tokens_get_all_of_them_under_sequence_shards(mesh: Any) -> None:
    module = stack()
    for layer in module.layers:
        layer.attention.o = Normalised(layer.attention.o.base, rank=4).double()
        layer.up = Normalised(layer.up.base, rank=4).double()
    compare(module, mesh, sequence_parallel=True)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_weight_decomposed_layers_are_split_by_output_and_by_input(dropout: float) -> None:
    report = explain(adapted("weight-decomposed, all", lora_dropout=dropout), 2)
    start = "base_model.model.model.layers.0."
    shapes = {name.removeprefix(start): report.spec(name).local_shape for name in report.parameters}
    q, o = "self_attn.q_proj.", "self_attn.o_proj."
    assert shapes[q + "base_layer.weight"] == (WIDTH // 2, WIDTH)
    assert shapes[o + "base_layer.weight"] == (WIDTH, WIDTH // 2)
    assert shapes[q + "lora_magnitude_vector.default.weight"] == (WIDTH // 2,)
    assert shapes[o + "lora_magnitude_vector.default.weight"] == (WIDTH,)
    assert shapes["mlp.down_proj.lora_A.default.weight"] == (4, 24)
    assert start + o + "lora_magnitude_vector.default.weight" in report.partial_gradients


def random_ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(3))


def compare(module: nn.Module, mesh: Any, ids: Tensor | None = None, **options: Any) -> None:
    """Outputs and gradients of a module on the ranks of a mesh against those of a copy that is whole."""
    whole = copy.deepcopy(module)
    report = parallelize(module, mesh, **options)
    ids = torch.arange(12).view(2, 6) if ids is None else ids
    seen = []
    for model in (module, whole):
        output = model(ids)
        output = output if isinstance(output, Tensor) else output.logits
        (output * random_tensor(*output.shape)).sum().backward()
        seen.append(output.detach().clone().contiguous())
    torch.testing.assert_close(seen[0], seen[1], **EXACT)
    reduce_partial_gradients(module, report.parameters, tensor_group(mesh))
    assert_same_gradients(module, report.parameters, whole)


class Grouped(nn.Linear):
    """Has a matrix for each of two groups of its input, so that its output has another shape than a linear layer's."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.view(2, -1, self.in_features).transpose(1, 2)
        return torch.stack([x @ each for each in rows], -2)


def test_a_linear_layer_whose_output_has_another_shape_stays_whole():
    assert not behaves_like_linear(Grouped(WIDTH, 2 * WIDTH))
    assert behaves_like_linear(nn.Linear(WIDTH, 2 * WIDTH))
