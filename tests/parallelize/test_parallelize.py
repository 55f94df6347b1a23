"""Modules written without us, split by a plan, train as one process does."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_megatron.parallelize import parallelize
from tests.harness import run_ranks
from tests.harness.twins import (
    EXACT,
    FLOAT32_GRADIENTS,
    FLOAT32_LOSS,
    assert_same_gradients,
    assert_same_weights,
    count_collectives,
    random_tensor,
    reduce_partial_gradients,
    tensor_group,
)
from tests.parallelize.models import (
    ARCHITECTURES,
    FLOAT32_NORMS,
    VOCABULARY,
    CausalSelfAttention,
    Encoder,
    HeadwiseAttention,
    NanoGPT,
    enlarged,
    hugging_face,
    tokens,
)
from tests.parallelize.models_own import BareLayers, ImageModel, ListLayers, Rows, Textbook, TiedWays, Translator

GATHERS = {"phi3", "olmo2", "codegen"}
NO_SEQUENCE_SHARDS = {"t5"}


def train(module, table, group, loss_of, steps, optimizer=torch.optim.AdamW):
    """Losses of some steps; with a table, partial gradients are summed as a gradient engine would.

    A key's bias has no gradient but rounding noise, which Adam would blow up to full steps: ``eps`` is large enough.
    """
    stepper = optimizer(module.parameters(), lr=0.001, **({"eps": 1e-6} if optimizer is torch.optim.AdamW else {}))
    losses = []
    for step in range(steps):
        stepper.zero_grad()
        loss = loss_of(module, tokens(seed=step))
        loss.backward()
        if table is not None:
            reduce_partial_gradients(module, table, group)
        stepper.step()
        losses.append(loss.item())
    return losses


def hugging_face_loss(module, ids):
    return module(input_ids=ids, labels=ids).loss


def loss_of_logits(module, ids):
    others = {"decoder_input_ids": ids} if module.config.is_encoder_decoder else {}
    return F.cross_entropy(module(input_ids=ids, **others).logits.flatten(0, 1), ids.roll(-1, 1).flatten())


def encoder_loss(module, ids):
    return F.cross_entropy(module(ids).transpose(1, 2), ids.roll(-1, 1), label_smoothing=0.1)


def nano_loss(module, ids):
    return module(ids, ids.roll(-1, 1))[1]


def image_loss(module, ids):
    return F.cross_entropy(module(random_tensor(2, 3, 16, 16, seed=int(ids[0, 0]))), ids[:, 0] % 10)


def translator_loss(module, ids):
    return F.cross_entropy(module(ids, ids.roll(1, 1)).transpose(1, 2), ids)


def check_hugging_face(mesh, name, sequence_parallel):
    module = hugging_face(name)
    whole, group = copy.deepcopy(module), tensor_group(mesh)
    report = parallelize(module, mesh, sequence_parallel=sequence_parallel)
    with count_collectives() as forward:
        loss = hugging_face_loss(module, tokens())
    with count_collectives() as backward:
        loss.backward()
    reduce_partial_gradients(module, report.parameters, group)
    expected = hugging_face_loss(whole, tokens())
    expected.backward()
    torch.testing.assert_close(loss, expected, **FLOAT32_LOSS)
    assert_same_gradients(module, report.parameters, whole, FLOAT32_GRADIENTS)
    strict = FLOAT32_GRADIENTS if name.startswith(FLOAT32_NORMS) else EXACT
    got = train(module, report.parameters, group, loss_of_logits, 3, torch.optim.SGD)
    want = train(whole, None, None, loss_of_logits, 3, torch.optim.SGD)
    torch.testing.assert_close(got, want, **strict)
    assert_same_gradients(module, report.parameters, whole, strict)
    assert_same_weights(module, report.parameters, whole, strict)
    if name in GATHERS or name == "t5":
        return
    if sequence_parallel:  # per layer 2 + 2; trunk ends 1 gather each way; embedding, head and loss as ever
        assert dict(forward) == {"all_reduce": 3, "all_gather_single": 5, "reduce_scatter_single": 4}
        assert dict(backward) == {"all_reduce": 1, "all_gather_single": 5, "reduce_scatter_single": 4}
    else:  # 2 per layer each way, 1 for the embedding, 2 for the loss; 1 for the head
        assert dict(forward) == {"all_reduce": 7} and dict(backward) == {"all_reduce": 5}


def plain_rows():
    """Every day each architecture once: whole sequences every third, and those that gather or have no shards."""
    named = GATHERS | NO_SEQUENCE_SHARDS
    for index, name in enumerate(ARCHITECTURES):
        yield pytest.param(name, marks=[] if index % 3 == 0 or name in named else [pytest.mark.wide])


@pytest.mark.everyday(3)
@pytest.mark.parametrize("name", list(plain_rows()))
@run_ranks(tensor=2)
def test_hugging_face_model_on_two_ranks_matches_one_process(mesh, name):
    check_hugging_face(mesh, name, False)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in NO_SEQUENCE_SHARDS])
@run_ranks(tensor=2)
def test_hugging_face_model_with_sequence_shards_matches_one_process(mesh, name):
    check_hugging_face(mesh, name, True)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", ["llama", "qwen3", "bloom", "falcon, one key/value head", "t5"])
@run_ranks(tensor=4)
def test_hugging_face_model_on_four_ranks_matches_one_process(mesh, name):
    check_hugging_face(mesh, name, False)


OWN = {
    "nanoGPT": (NanoGPT, nano_loss),
    "nanoGPT, head size kept": (lambda: NanoGPT(HeadwiseAttention), nano_loss),
    "textbook": (Textbook, encoder_loss),
    "encoder": (Encoder, encoder_loss),
    "encoder, norm first": (lambda: Encoder(norm_first=True), encoder_loss),
    "encoder, sequence first": (lambda: Encoder(batch_first=False), encoder_loss),
    "tied layers, each with a part of its own": (TiedWays, encoder_loss),
}
OTHERS = {
    "image model": (ImageModel, image_loss),
    "translator": (Translator, translator_loss),
    "bare layers": (BareLayers, encoder_loss),
    "bare layers, one key/value head": (lambda: BareLayers(1), encoder_loss),
    "list layers": (ListLayers, encoder_loss),
}


@pytest.mark.parametrize("name", OTHERS)
@run_ranks(tensor=2)
def test_other_ways_of_writing_a_transformer_match_one_process_without_gathering(mesh, name):
    build, loss_of = OTHERS[name]
    torch.manual_seed(0)
    module = build().double()
    whole, group = copy.deepcopy(module), tensor_group(mesh)
    report = parallelize(module, mesh)
    assert "split_input" not in report.explain()
    with count_collectives() as counts:
        loss = loss_of(module, tokens())
        loss.backward()
    assert counts["all_gather_single"] == 0
    reduce_partial_gradients(module, report.parameters, group)
    loss_of(whole, tokens()).backward()
    assert_same_gradients(module, report.parameters, whole)
    got = train(module, report.parameters, group, loss_of, 3)
    torch.testing.assert_close(got, train(whole, None, None, loss_of, 3), **EXACT)
    assert_same_weights(module, report.parameters, whole)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@run_ranks(tensor=2)
def test_own_module_matches_one_process_over_six_adamw_steps_exactly(mesh, name, sequence_parallel):
    build, loss_of = OWN[name]
    torch.manual_seed(0)
    module = enlarged(build().double())
    whole, group = copy.deepcopy(module), tensor_group(mesh)
    report = parallelize(module, mesh, sequence_parallel=sequence_parallel)
    loss = loss_of(module, tokens())
    loss.backward()
    reduce_partial_gradients(module, report.parameters, group)
    loss_of(whole, tokens()).backward()
    assert_same_gradients(module, report.parameters, whole)
    got = train(module, report.parameters, group, loss_of, 6)
    want = train(whole, None, None, loss_of, 6)
    torch.testing.assert_close(got, want, **EXACT)
    assert_same_weights(module, report.parameters, whole)
    module.eval(), whole.eval()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(module, tokens(seed=9)), loss_of(whole, tokens(seed=9)), **EXACT)


@run_ranks(tensor=2)
def test_plan_shows_what_was_adapted_and_what_had_to_be_gathered(mesh):
    torch.manual_seed(0)
    from_input = parallelize(NanoGPT(CausalSelfAttention), mesh).explain()
    from_attribute = parallelize(NanoGPT(HeadwiseAttention), mesh).explain()
    unrun = parallelize(hugging_face("codegen"), mesh).explain()  # a branch keeps its cache
    gathered = parallelize(ReturnsColumns(), mesh, example=torch.randn(2, 3, 8)).explain()
    assert "sees the local width" in from_input and "sees the local width" not in from_attribute
    for text in (from_input, from_attribute):
        assert "packed_colwise" in text and "n_head=2" in text and "n_embd=16" in text and "split_input" not in text
    assert "rowwise_split_input" in unrun
    assert "rowwise_split_input" in gathered and "gathered:" in gathered


class ReturnsColumns(nn.Module):
    """A pair of layers, of which the first one's output is returned as well."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.up(x)
        return self.down(hidden.relu()), hidden


@pytest.mark.wide
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.wide), True])
@run_ranks(tensor=2)
def test_compiled_blocks_that_read_their_width_from_the_input_match(mesh, sequence_parallel):
    torch.manual_seed(0)
    module = enlarged(NanoGPT().double())
    whole = copy.deepcopy(module)
    report = parallelize(module, mesh, sequence_parallel=sequence_parallel)
    blocks = module.transformer["h"]
    for index in range(2):
        blocks[index] = torch.compile(blocks[index], backend="aot_eager")
    with warnings.catch_warnings():  # the compiler's own
        warnings.simplefilter("ignore")
        loss = nano_loss(module, tokens())
        loss.backward()
    expected = nano_loss(whole, tokens())
    expected.backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    for index in range(2):
        blocks[index] = blocks[index]._orig_mod
    reduce_partial_gradients(module, report.parameters, tensor_group(mesh))
    assert_same_gradients(module, report.parameters, whole)


@run_ranks(tensor=2)
def test_ranks_that_drew_different_weights_start_from_those_of_the_first(mesh):
    torch.manual_seed(torch.distributed.get_rank())
    module = NanoGPT().double()
    report = parallelize(module, mesh)
    torch.manual_seed(0)
    assert_same_weights(module, report.parameters, NanoGPT().double(), {"rtol": 0, "atol": 0})


@run_ranks(tensor=3)
def test_three_ranks_with_an_odd_vocabulary_match_one_process(mesh):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(301, 12)
            self.layers = nn.ModuleList(
                [nn.TransformerEncoderLayer(12, 3, 18, dropout=0.0, batch_first=True) for _ in range(2)]
            )
            self.head = nn.Linear(12, 301)

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    torch.manual_seed(0)
    module = Small().double()
    whole = copy.deepcopy(module)
    report = parallelize(module, mesh)
    assert module.head.weight.shape == (128, 12) and report.spec("head.weight").global_shape == (301, 12)
    got = train(module, report.parameters, tensor_group(mesh), encoder_loss, 3)
    torch.testing.assert_close(got, train(whole, None, None, encoder_loss, 3), **EXACT)
    assert_same_weights(module, report.parameters, whole)


REFUSED = {
    "typo": ({"layers.*.self_attn.q_prj": "colwise"}, "did you mean 'model.layers.\\*.self_attn.q_proj'"),
    "unknown style": ({"lm_head": "colwize"}, "Did you mean 'colwise'"),
    "style on a container": ({"layers.*.mlp": "colwise"}, "needs a linear layer; it holds"),
    "embedding style on a linear": ({"lm_head": "embedding_rowwise"}, "torch.nn.Embedding"),
    "unmatched column": ({"layers.*.mlp.up_proj": "colwise"}, "gives no row-parallel layer"),
    "mixed": (
        {"layers.*.mlp.up_proj": "colwise_gather_output", "layers.*.mlp.down_proj": "rowwise"},
        "do not fit together",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@run_ranks(tensor=2)
def test_bad_plan_is_refused_with_what_to_change(mesh, case):
    plan, message = REFUSED[case]
    module = hugging_face("llama")
    with pytest.raises(ValueError, match=message):
        parallelize(module, mesh, plan)
    assert module.lm_head.weight.shape == (VOCABULARY, 32)


@run_ranks(tensor=2)
def test_explicit_plan_that_computes_something_else_is_refused_naming_the_layer(mesh):
    plan = {"h.*.attn.c_attn": "colwise", "h.*.attn.c_proj": "rowwise"}
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.c_proj.*packed_colwise"):
        parallelize(hugging_face("gpt2"), mesh, plan)
    plan["h.*.attn.c_attn"] = "packed_colwise"
    report = parallelize(hugging_face("gpt2"), mesh, plan)
    assert report.spec("transformer.h.0.attn.c_attn.weight").local_shape == (32, 48)


@run_ranks(tensor=4)
def test_sizes_that_do_not_divide_are_refused_with_sizes_that_do(mesh):
    with pytest.raises(ValueError, match=r"attention heads.* is 6, not divisible .* 4; use .*size=3 or 6.* to 4 or 8"):
        parallelize(hugging_face("llama", num_attention_heads=6, hidden_size=48), mesh)
    with pytest.raises(ValueError, match=r"down_proj.* is 50, not divisible .*; use .*size=2 or 5.* to 48 or 52"):
        parallelize(hugging_face("llama", intermediate_size=50), mesh)


@run_ranks(tensor=2)
def test_sequence_length_that_does_not_divide_is_refused_with_the_length_to_use(mesh):
    module = hugging_face("llama")
    parallelize(module, mesh, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"13 is not divisible.*14 or 12"):
        module(input_ids=tokens(length=13))
    with pytest.raises(ValueError, match="encoder-decoder"):
        parallelize(hugging_face("t5"), mesh, sequence_parallel=True)


@run_ranks(tensor=2)
def test_layers_that_are_given_no_tokens_are_refused_under_sequence_shards(mesh):
    module = Rows()
    parallelize(module, mesh, sequence_parallel=True, example=torch.ones(2, 8, 16))
    with pytest.raises(ValueError, match=r"'layers\.0' gets a hidden state of shape \(8, 16\)"):
        module(torch.ones(8, 16))


@run_ranks(tensor=2)
def test_attention_weights_in_a_loss_match_one_process_or_are_refused_with_what_to_change(mesh):
    def penalised(module, ids, **options):
        found = module(input_ids=ids, **options)
        return found.logits.square().mean() + sum(x[:, 0].square().mean() for x in found.attentions)

    module = hugging_face("llama", attn_implementation="eager", output_attentions=True)
    whole, group = copy.deepcopy(module), tensor_group(mesh)
    report = parallelize(module, mesh)
    loss, expected = penalised(module, tokens()), penalised(whole, tokens())
    torch.testing.assert_close(loss, expected, **FLOAT32_GRADIENTS)
    loss.backward()
    expected.backward()
    reduce_partial_gradients(module, report.parameters, group)
    assert_same_gradients(module, report.parameters, whole, FLOAT32_GRADIENTS)
    split = hugging_face("llama", attn_implementation="eager")
    parallelize(split, mesh)
    with pytest.raises(ValueError, match="called with `output_attentions=True`, but its attention heads are split"):
        penalised(split, tokens(), output_attentions=True)
    split.config.output_attentions = True
    with pytest.raises(ValueError, match="Build the model from a configuration with `output_attentions=True`"):
        penalised(split, tokens())
