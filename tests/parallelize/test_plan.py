"""Plans without processes: the same decisions with and without weights, and what the command prints."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric
from typer.testing import CliRunner

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers import vocab_parallel_cross_entropy
from lightning_megatron.parallelize import explain
from lightning_megatron.parallelize.pairs.decide import draw_up
from lightning_megatron.parallelize.plan.blueprint import ColumnCut
from lightning_megatron.parallelize.plan.patterns import generalize, matches
from lightning_megatron.parallelize.reading import inputs
from lightning_megatron.parallelize.reading.heads import HeadSizes
from lightning_megatron.parallelize.reading.inputs import run_examples
from lightning_megatron.tools.commands.cli import app
from tests.models.other_models import SPLIT
from tests.parallelize.models import LLAMA, VOCABULARY, NanoGPT, hugging_face
from tests.parity.zoo.hazards import PerLayerMasks
from tests.parity.zoo.language import RelativeBias


@pytest.mark.parametrize(
    "name",
    ["llama", "gpt2", "t5", *(pytest.param(name, marks=pytest.mark.wide) for name in ("olmo2", "bloom", "bert"))],
)
def test_module_without_weights_gets_the_plan_of_the_same_module_with_weights(name):
    depth = "n_layer" if name in ("gpt2", "bloom") else "num_layers" if name == "t5" else "num_hidden_layers"
    with torch.device("meta"):
        weightless = hugging_face(name, **{depth: 5})
    real = hugging_face(name, **{depth: 5})
    before = {key: value.clone() for key, value in real.state_dict().items()}
    on_meta, on_cpu = explain(weightless, 2), explain(real, 2)
    assert on_meta.explain(every_layer=True) == on_cpu.explain(every_layer=True)
    assert on_meta.parameters == on_cpu.parameters
    assert any(not sharding.replicated for sharding in on_cpu.parameters.values())
    after = real.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before) and not hasattr(real, "_sharding")


class Chain(nn.Module):
    """Layers of one kind, of which two are split as a pair; an odd one is left."""

    def __init__(self, device: str) -> None:
        super().__init__()
        with torch.device(device):
            self.embed = nn.Embedding(VOCABULARY, 16)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_layers_without_weights_that_are_split_by_turns_do_not_stand_for_each_other():
    on_meta, on_cpu = explain(Chain("meta"), 2), explain(Chain("cpu"), 2)
    assert on_meta.parameters == on_cpu.parameters
    assert not on_cpu.parameters["layers.0.weight"].replicated


def test_strategy_explains_the_plan_of_a_module_before_any_process_starts():
    strategy = MegatronStrategy(tensor_parallel_size=2)
    assert strategy.explain(hugging_face("gpt2")) == explain(hugging_face("gpt2"), 2).explain()
    with pytest.raises(RuntimeError, match=r"strategy\.explain\(module\)"):
        strategy.explain()


def test_plan_names_styles_shapes_and_collectives():
    text = explain(hugging_face("gpt2"), 2, sequence_parallel=True).explain()
    lines = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert "packed_colwise" in lines["transformer.h.*.attn.c_attn"] and "32x96" in lines["transformer.h.*.attn.c_attn"]
    assert "32x48" in lines["transformer.h.*.attn.c_attn"] and "split_size=16" in lines["transformer.h.*.attn.c_attn"]
    assert "reduce-scatter" in lines["transformer.h.*.mlp.c_proj"] and "logits stay split" in lines["lm_head"]
    assert "300x32" in lines["transformer.wte"] and "256x32" in lines["transformer.wte"]


def test_partial_gradients_are_those_of_sequence_shards_and_of_local_heads():
    plain = explain(hugging_face("qwen3"), 2).partial_gradients
    assert [generalize(name) for name in plain[:2]] == [
        "model.layers.*.self_attn.q_norm.weight",
        "model.layers.*.self_attn.k_norm.weight",
    ]
    split = {generalize(name) for name in explain(hugging_face("qwen3"), 2, sequence_parallel=True).partial_gradients}
    assert "model.layers.*.input_layernorm.weight" in split and "model.norm.weight" not in split
    assert "model.layers.*.self_attn.q_proj.weight" not in split
    assert explain(hugging_face("llama"), 2).partial_gradients == []


def test_replicated_key_value_heads_are_whole_and_their_gradients_summed():
    report = explain(hugging_face("llama"), 4)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert report.parameters[name].replicated and name in report.partial_gradients


def test_attention_left_whole_gets_all_tokens_under_sequence_shards():
    plan = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    report = explain(hugging_face("llama"), 2, plan, sequence_parallel=True)
    assert {row.name for row in report.rows if row.style == "all tokens"} == {
        f"model.layers.{index}.self_attn" for index in range(2)
    }
    split = set(report.partial_gradients)
    assert "model.layers.0.input_layernorm.weight" in split and "model.layers.0.self_attn.q_proj.weight" not in split


def test_own_plan_of_experts_only_leaves_the_attention_to_the_rules():
    report = explain(hugging_face("granitemoe"), 2)
    assert report.source == "rules"
    assert report.spec("model.layers.0.self_attn.q_proj.weight").local_shape == (16, 32)


def test_width_of_all_heads_is_adapted_whatever_its_name():
    table = explain(hugging_face("megatron_bert"), 2).explain()
    assert "all_head_size=16" in table and "gathered" not in table


def test_a_bias_with_an_entry_per_head_is_cut_as_the_heads_are_where_only_short_sequences_fit():
    table = explain(RelativeBias(), 2).explain()
    assert "per-head table" in table and "heads=1" in table and "gathered" not in table


def test_lengths_that_buffers_fix_are_tried():
    table = explain(PerLayerMasks(), 2).explain()
    assert "heads=1" in table and "gathered" not in table


def test_query_heads_per_key_value_head_are_local_though_the_trial_can_do_without():
    blueprint = draw_up(hugging_face("gpt_bigcode"), 2, "auto")
    region = next(region for region in blueprint.regions if region.sizes is not None)
    assert region.sizes.key_value == 1
    groups = {name: value for (_, name), value in region.attributes.items() if name == "num_key_value_groups"}
    assert groups == {"num_key_value_groups": region.sizes.heads // 2}


@pytest.mark.parametrize(("kind", "least"), [("images and texts", 16), ("series", 8), ("series with times", 8)])
def test_models_that_take_images_beside_texts_or_series_run_on_guessed_inputs(kind, least):
    trace, untraced = run_examples(SPLIT[kind].build())
    assert trace is not None and not untraced and len(trace.sources) > least


def test_layers_whose_code_a_short_input_replaces_are_split_with_whole_outputs():
    region = next(r for r in draw_up(SPLIT["sparse attention"].build(), 2, "auto").regions if r.sizes is not None)
    assert region.gathered and "replaces 'bert.encoder.layer.0.attention.self' as it runs" in region.note


class Fork(nn.Module):
    """Two layers read one split output."""

    def __init__(self):
        super().__init__()
        self.up, self.left, self.right = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x):
        y = torch.relu(self.up(x))
        return self.left(y) * self.right(y)


def test_plan_for_an_output_that_two_layers_read_is_refused_naming_them():
    plan = {"up": "colwise", "left": "rowwise", "right": "rowwise"}
    with pytest.raises(ValueError, match=r"'up': its output is read by 'left' and 'right'.*colwise_gather_output"):
        explain(Fork(), 2, plan, example=torch.randn(2, 3, 8))


def test_module_that_cannot_be_run_says_what_to_give():
    class Closed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

        def forward(self, *, secret):
            raise RuntimeError("needs a secret")

    with pytest.raises(ValueError, match=r"example_input_array.*tensor_parallel_plan"):
        explain(Closed(), 2)


def test_pairs_of_a_plan_for_a_module_that_cannot_be_run_follow_the_order_of_its_layers():
    chain = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
    plan = {"0": "colwise", "1": "rowwise", "2": "colwise", "3": "rowwise"}
    found = [(region.columns, region.row) for region in draw_up(chain, 2, plan).regions]
    assert found == [(["0"], "1"), (["2"], "3")]


def test_module_without_pairs_says_so():
    with pytest.raises(ValueError, match="no column/row pair"):
        explain(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 2, example=torch.randn(2, 4))


def test_a_pair_is_found_around_an_activation_that_works_in_place():
    pair = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    found = explain(pair, 2, example=torch.randn(2, 3, 4)).explain()
    assert "colwise" in found and "rowwise" in found, found


def test_plan_that_is_a_word_but_not_auto_is_refused():
    with pytest.raises(ValueError, match="'auto' or a dict"):
        explain(NanoGPT(), 2, "columns")


def test_patterns_match_whole_components_from_the_end():
    assert matches("layers.*.mlp.up_proj", "model.layers.11.mlp.up_proj")
    assert not matches("layers.*.mlp.up_proj", "model.layers.11.mlp.gate_up_proj")
    assert not matches("layers.*", "layers.1.mlp")
    assert generalize("h.12.attn2.0.c") == "h.*.attn2.*.c"


def test_scarce_key_value_heads_are_chosen_by_the_query_heads_that_read_them():
    sizes = HeadSizes(heads=4, key_value=2, size=2)
    cut = ColumnCut((8, 4, 4), (None, sizes, sizes))
    assert cut.ranges(4, 3) == ((6, 8), (10, 12), (14, 16))
    assert cut.keeps_parameter and cut.fits(4)


def test_command_prints_the_plan_of_a_config(tmp_path):
    config = {**LLAMA, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["explain", "--hf-config", str(tmp_path / "config.json"), "--tensor", "2"])
    assert result.exit_code == 0, result.output
    assert "model.layers.*.self_attn.q_proj" in result.output and f"{VOCABULARY}x32" in result.output
    refused = CliRunner().invoke(app, ["explain", "--hf-config", str(tmp_path), "--tensor", "3"])
    assert refused.exit_code != 0 and "not divisible" in refused.output


@pytest.mark.parametrize("kind", ["images", "sounds"])
def test_models_of_images_and_sounds_are_read_on_inputs_of_the_configured_size(kind):
    import transformers

    common = {"num_attention_heads": 4, "num_hidden_layers": 2}
    if kind == "images":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "image_size": 8, "patch_size": 4}
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**common, **sizes))
        names = {"vit.layers.*.attention.q_proj", "vit.layers.*.mlp.fc2"}
    else:
        config = transformers.WhisperConfig(
            **{"vocab_size": 64, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48},
            **{"decoder_ffn_dim": 48, "max_source_positions": 10, "pad_token_id": 0, "decoder_start_token_id": 1},
        )
        model = transformers.WhisperForConditionalGeneration(config)
        names = {"model.encoder.layers.*.self_attn.q_proj", "model.decoder.layers.*.encoder_attn.out_proj"}
    split = {generalize(name) for name, sharding in explain(model, 2).parameters.items() if not sharding.replicated}
    assert names <= {name.rpartition(".")[0] for name in split}


class Routed(nn.Module):
    """A layer that says how evenly it uses its two experts, by an attribute or besides its output."""

    def __init__(self, kept):
        super().__init__()
        self.up, self.down, self.gate, self.kept = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 2), kept
        self.balance = None

    def forward(self, x):
        uneven = self.gate(x).softmax(-1).mean((0, 1)).square().sum()
        y = x + self.down(self.up(x).relu())
        if not self.kept:
            return y, uneven
        self.balance = uneven
        return y


class RoutedStack(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.embed, self.layers = nn.Embedding(20, 8), nn.ModuleList([Routed(kept) for _ in range(2)])

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) if layer.kept else layer(x)[0]
        return x


@pytest.mark.parametrize(("kept", "named"), [(True, "its `balance`"), (False, "output 1")])
def test_auxiliary_losses_over_tokens_are_refused_under_sequence_shards(kept, named):
    explain(RoutedStack(kept), 2)
    with pytest.raises(ValueError, match=f"'layers.0' mixes tokens.*{named}.*computed over all tokens"):
        explain(RoutedStack(kept), 2, sequence_parallel=True)


@pytest.mark.parametrize("how", [float, torch.Tensor.detach, "hook", "metric", "buffer"])
def test_numbers_that_layers_keep_of_all_tokens_are_refused_under_sequence_shards(how):
    class Measured(Routed):
        def forward(self, x):
            y = super().forward(x)
            self.balance, self.length, self.scale = None, x.shape[1], 0.5
            if how == "metric":
                self.size.update(y.detach().abs())
            elif how == "buffer":
                self.size += y.detach().abs().mean()
            elif how != "hook":
                self.size = how(y.abs().mean())
            return y

    model = RoutedStack(True)
    model.layers = nn.ModuleList([Measured(True) for _ in range(2)])
    for layer in model.layers:
        if how == "metric":
            layer.size = MeanMetric()
        elif how == "buffer":
            layer.register_buffer("size", torch.zeros(()))
    if how == "hook":
        explain(model, 2, sequence_parallel=True)
        for layer in model.layers:
            layer.register_forward_hook(lambda module, _, y: setattr(module, "size", float(y.norm())))
    explain(model, 2)
    with pytest.raises(ValueError, match=r"'layers.0' mixes tokens.*its `size.*`.*computed over all tokens"):
        explain(model, 2, sequence_parallel=True)


@pytest.mark.parametrize(("kept", "named"), [(True, "its `balance`"), (False, "output 1")])
def test_auxiliary_losses_that_agree_by_chance_are_refused_as_well(kept, named):
    model = RoutedStack(kept)
    for layer in model.layers:
        nn.init.zeros_(layer.gate.weight)  # a balance at its minimum, for any tokens
        nn.init.zeros_(layer.gate.bias)
    with pytest.raises(ValueError, match=f"'layers.0' mixes tokens.*{named}.*computed over all tokens"):
        explain(model, 2, sequence_parallel=True)


def test_models_that_collect_router_outputs_are_refused_under_sequence_shards():
    model = hugging_face("mixtral", output_router_logits=True)
    explain(model, 2)
    with pytest.raises(ValueError, match="output_router_logits=True"):
        explain(model, 2, sequence_parallel=True)


class Decoder(nn.Module):
    """Layers that attend to a memory as well."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.TransformerDecoderLayer(8, 2, 16, batch_first=True) for _ in range(2)])

    def forward(self, ids):
        x = self.embed(ids)
        memory = x.mean(1, keepdim=True)
        for layer in self.layers:
            x = layer(x, memory)
        return x


def test_attention_to_a_memory_is_refused_under_sequence_shards():
    explain(Decoder(), 2)
    with pytest.raises(ValueError, match=r"'layers.0.multihead_attn' are different tensors"):
        explain(Decoder(), 2, sequence_parallel=True)


@pytest.mark.parametrize(("size", "plan", "said"), [(0, "auto", "at least 1"), (2, ["colwise"], "a dict of patterns")])
def test_sizes_and_plans_of_another_kind_are_refused(size, plan, said):
    with pytest.raises(ValueError, match=said):
        explain(NanoGPT(), size, plan)


def test_loss_without_a_group_is_that_of_torch():
    logits, target = torch.randn(3, 7, 5), torch.randint(0, 7, (3, 5))
    options = {"ignore_index": 2, "label_smoothing": 0.1, "weight": torch.rand(7)}
    for reduction in ("mean", "sum", "none"):
        expected = nn.functional.cross_entropy(logits, target, reduction=reduction, **options)
        assert torch.equal(vocab_parallel_cross_entropy(logits, target, reduction=reduction, **options), expected)


def test_module_in_several_places_is_read_and_left_as_it_was():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.layers = nn.ModuleList(
                [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)]
            )
            for layer in self.layers[1:]:
                layer[0] = self.layers[0][0]

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = x + layer(x)
            return x

    module = Shared()
    before = dict(module.named_parameters(remove_duplicate=False))
    with pytest.raises(ValueError, match="no column/row pair"):
        explain(module, 2)
    after = dict(module.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)


class Alone(LightningModule):
    """A LightningModule without a ``forward``, as many are: its step calls the network in it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


class Decorated(Alone):
    """A ``forward`` whose decorator adds an argument: what it says of itself is not how it is called."""

    def _forward(self, scale, x):
        return scale * self.net(x)

    @functools.wraps(_forward)
    def forward(self, *args):
        return self._forward(2.0, *args)


@pytest.mark.parametrize(("kind", "ran"), [(Alone, ["Sequential"]), (Decorated, ["Decorated"])])
def test_only_what_a_part_can_be_called_with_is_tried(kind, ran, monkeypatch):
    tried = []

    def counted(part, args, kwargs, **options):
        tried.append(type(part).__name__)
        return traced(part, args, kwargs, **options)

    traced = inputs.trace
    monkeypatch.setattr(inputs, "trace", counted)
    found, why = run_examples(kind())
    assert found is not None, why
    assert tried == ran
