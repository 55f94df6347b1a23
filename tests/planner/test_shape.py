"""Shapes count what the papers count, and read configurations and modules alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_megatron.planner.model.module_shape import shape_from_module
from lightning_megatron.planner.model.shape import ModelShape

GPT3 = ModelShape(layers=96, hidden=12288, heads=96, vocab=51200, seq=2048, positions=2048)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def test_parameters_are_those_of_the_papers_formula() -> None:
    layers, hidden, vocab, seq = 96, 12288, 51200, 2048
    formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + seq) / (12 * layers * hidden))
    assert GPT3.parameters == pytest.approx(formula, rel=1e-6)
    assert GPT3.parameters == pytest.approx(174.6e9, rel=1e-3)


def test_model_flops_are_those_of_the_papers_formula() -> None:
    layers, hidden, vocab, seq = 96, 12288, 51200, 2048
    per_token = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))
    assert GPT3.model_flops_per_token == pytest.approx(per_token, rel=1e-12)


def test_full_recomputation_repeats_the_layers_but_not_the_head() -> None:
    layers, hidden, vocab, seq = 96, 12288, 51200, 2048
    hardware = 96 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    assert GPT3.model_flops_per_token + GPT3.layer_flops_per_token == pytest.approx(hardware, rel=1e-12)


def test_a_hugging_face_config_gives_the_models_known_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shape = ModelShape.from_config(tmp_path)
    assert shape == ModelShape.from_config(LLAMA) == ModelShape.from_config(tmp_path / "config.json")
    assert (shape.gated, shape.tied, shape.key_value_heads, shape.seq) == (True, False, 8, 8192)
    assert shape.parameters == 8_030_261_248


def test_files_that_leave_tied_embeddings_out_mean_what_their_family_does() -> None:
    written = {name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"}
    assert not ModelShape.from_config(written).tied
    assert ModelShape.from_config({**written, "model_type": "gemma"}).tied


@pytest.mark.parametrize(
    ("changes", "gated"),
    [({"hidden_act": "relu2"}, False), ({"hidden_act": "gelu"}, True), ({"model_type": "phi"}, False), ({}, True)],
)
def test_squared_relu_has_no_gate(changes: dict[str, str], gated: bool) -> None:
    assert ModelShape.from_config({**LLAMA, **changes}).gated is gated


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 8}, "8 experts per layer in a way that is not known here"),
        ({"ffn_config": {"moe_num_experts": 4}}, "4 experts per layer"),
        ({"is_encoder_decoder": True, "model_type": "t5"}, "`model_type=t5` has an encoder and a decoder"),
        ({"max_position_embeddings": None}, "no sequence length .*give `seq`"),
    ],
)
def test_configs_that_would_be_counted_wrongly_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape.from_config({**LLAMA, **changes})


def test_an_incomplete_config_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"no layers .*num_hidden_layers"):
        ModelShape.from_config({key: value for key, value in LLAMA.items() if key != "num_hidden_layers"})


@pytest.mark.parametrize("name", ["layers", "hidden", "vocab", "kv_heads"])
def test_sizes_below_one_are_refused(name: str) -> None:
    values = {"layers": 2, "hidden": 8, "heads": 2, "vocab": 9, "seq": 4, "kv_heads": 2, name: 0}
    with pytest.raises(ValueError, match=f"`{name}=0`"):
        ModelShape(**values)


def test_heads_must_share_key_value_heads_evenly() -> None:
    with pytest.raises(ValueError, match=r"`heads=8` is not a multiple of `kv_heads=3`"):
        ModelShape(layers=2, hidden=64, heads=8, vocab=9, seq=4, kv_heads=3)


class _Block(nn.Module):
    def __init__(self, hidden: int, gated: bool) -> None:
        super().__init__()
        self.num_heads = 4
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        if gated:
            self.gate = nn.Linear(hidden, 4 * hidden)


class _Model(nn.Module):
    def __init__(self, tied: bool = False, gated: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(_Block(64, gated) for _ in range(5))
        self.final = nn.LayerNorm(64)
        self.head = nn.Linear(64, 100, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_modules_shape_has_the_modules_parameters(tied: bool) -> None:
    shape = shape_from_module(lambda: _Model(tied=tied), seq=32)
    assert shape.parameters == sum(p.numel() for p in _Model(tied=tied).parameters())
    assert (shape.layers, shape.hidden, shape.heads, shape.inner, shape.tied) == (5, 64, 4, 256, tied)


def test_a_gated_module_is_recognised() -> None:
    shape = shape_from_module(_Model(gated=True), seq=32)
    assert shape.gated
    assert shape.layer_matrix_parameters == 4 * 64 * 64 + 3 * 64 * 256


def test_a_table_of_positions_is_counted() -> None:
    model = _Model(tied=True)
    model.positions = nn.Embedding(32, 64)
    assert shape_from_module(model, seq=32).parameters == sum(p.numel() for p in model.parameters())


def test_a_layer_with_experts_is_refused() -> None:
    model = _Model()
    for block in model.blocks:
        block.experts = nn.ModuleList(nn.Linear(64, 256) for _ in range(8))
    with pytest.raises(ValueError, match=r"a layer of _Block has .* as a ModelShape"):
        shape_from_module(model, seq=32)


def test_counting_a_large_module_allocates_nothing() -> None:
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(nn.Sequential(nn.Embedding(50000, 8192), nn.Sequential(*(_Block(8192, False) for _ in range(4)))))
        return built[0]

    assert shape_from_module(build, seq=8, heads=64).layers == 4
    assert all(parameter.is_meta for parameter in built[0].parameters())


def test_a_module_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no nn\.ModuleList"):
        shape_from_module(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)), seq=4)
    assert torch.get_default_device().type == "cpu"
