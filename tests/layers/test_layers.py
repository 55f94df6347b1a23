"""Drop-in layers on several ranks give the outputs and gradients of their torch counterparts on one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_megatron.layers import (
    ColumnParallelLinear,
    ParallelMLP,
    ParallelMultiheadAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLogits,
    vocab_parallel_cross_entropy,
)
from lightning_megatron.layers.loss import local_vocabulary
from lightning_megatron.mesh.messages.collectives import gather_from_group, split_to_group
from tests.harness import run_ranks
from tests.harness.twins import (
    EXACT,
    assert_same_gradients,
    count_collectives,
    random_tensor,
    reduce_partial_gradients,
    tensor_group,
)


def prefixed(name, table):
    return {f"{name}.{key}": value for key, value in table.items()}


def compare(sharded, table, whole, inputs, group):
    """Forward and backward of both with the same inputs; returns nothing, asserts everything."""
    ours = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    theirs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    out, expected = sharded(*ours), whole(*theirs)
    torch.testing.assert_close(out, expected, **EXACT)
    weights = random_tensor(*expected.shape, seed=9)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    reduce_partial_gradients(sharded, table, group)
    for mine, other in zip(ours, theirs, strict=True):
        if mine.is_floating_point():
            torch.testing.assert_close(mine.grad, other.grad, **EXACT)
    assert_same_gradients(sharded, table, whole)


@run_ranks(tensor=2)
def test_column_then_row_matches_two_unsharded_linears_with_one_all_reduce_each_way(mesh):
    torch.manual_seed(0)
    pair = nn.Sequential(ColumnParallelLinear(6, 8), nn.GELU(), RowParallelLinear(8, 6)).double()
    whole = copy.deepcopy(pair)
    table = prefixed("0", pair[0].shard_(mesh)) | prefixed("2", pair[2].shard_(mesh))
    assert pair[0].weight.shape == (4, 6) and pair[2].weight.shape == (6, 4)
    with count_collectives() as counts:
        compare(pair, table, whole, [random_tensor(3, 5, 6)], tensor_group(mesh))
    assert dict(counts) == {"all_reduce": 2}


@run_ranks(tensor=2)
def test_gathered_output_and_whole_input_suit_code_that_reads_everything(mesh):
    torch.manual_seed(0)
    pair = nn.Sequential(
        ColumnParallelLinear(6, 8, gather_output=True), RowParallelLinear(8, 6, input_is_parallel=False)
    ).double()
    whole = copy.deepcopy(pair)
    table = prefixed("0", pair[0].shard_(mesh)) | prefixed("1", pair[1].shard_(mesh))
    compare(pair, table, whole, [random_tensor(3, 6)], tensor_group(mesh))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@run_ranks(tensor=2)
def test_mlp_matches_unsharded_with_and_without_sequence_shards(mesh, gated, sequence):
    torch.manual_seed(0)
    group = tensor_group(mesh)
    mlp = ParallelMLP(6, 8, gated=gated).double()
    whole = copy.deepcopy(mlp)
    table = mlp.shard_(mesh, sequence_dim=1 if sequence else None)

    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = mlp

        def forward(self, x):
            if not sequence:
                return self.mlp(x)
            return gather_from_group(self.mlp(split_to_group(x, 1, group)), 1, group)

    with count_collectives() as counts:
        compare_outside = Outside()
        whole_outside = nn.Module.__new__(nn.Sequential)
        nn.Module.__init__(whole_outside)
        whole_outside.mlp = whole
        whole_outside.forward = lambda x: whole(x)
        compare(compare_outside, prefixed("mlp", table), whole_outside, [random_tensor(2, 4, 6)], group)
    if not sequence:
        assert dict(counts) == {"all_reduce": 2}
    else:  # split and gather outside: two gathers; inside: gather + scatter each way; one sum of the bias gradient
        assert counts["reduce_scatter_single"] == 2 and counts["all_gather_single"] == 4 and counts["all_reduce"] == 1


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
@run_ranks(tensor=2)
def test_embedding_of_an_odd_vocabulary_matches_torch(mesh, options):
    torch.manual_seed(0)
    embedding = VocabParallelEmbedding(301, 4, **options).double()
    whole = copy.deepcopy(embedding)
    table = embedding.shard_(mesh)
    assert embedding.weight.shape == (256, 4)
    tokens = torch.tensor([[0, 3, 3, 300], [255, 256, 257, 0]])
    compare(embedding, table, whole, [tokens], tensor_group(mesh))
    with pytest.raises(IndexError, match="301"):
        embedding(torch.tensor([301]))


ATTENTIONS = [
    {},
    {"bias": False},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 6, "vdim": 10},
    {"batch_first": False},
    {"num_key_value_heads": 2},
    {"num_key_value_heads": 1},
]


@pytest.mark.parametrize("options", ATTENTIONS, ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
@run_ranks(tensor=2)
def test_attention_matches_torch_for_self_and_cross_inputs_and_every_mask(mesh, options, need_weights):
    torch.manual_seed(0)
    attention = ParallelMultiheadAttention(8, 4, **{"batch_first": True, **options}).double()
    whole = copy.deepcopy(attention)
    table = attention.shard_(mesh)
    group = tensor_group(mesh)
    batch_first = attention.batch_first
    x = random_tensor(*((3, 5, 8) if batch_first else (5, 3, 8)))
    key = random_tensor(*((3, 5) if batch_first else (5, 3)), options.get("kdim", 8), seed=2)
    value = random_tensor(*((3, 5) if batch_first else (5, 3)), options.get("vdim", 8), seed=3)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    masks = [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True},
        {"attn_mask": random_tensor(12, 5, 5, seed=4), "average_attn_weights": False},
    ]
    for mask in masks:
        inputs = (key, value) if "kdim" in options else None
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        got = attention(mine, *(inputs or (mine, mine)), need_weights=need_weights, **mask)
        want = whole(other, *(inputs or (other, other)), need_weights=need_weights, **mask)
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, **EXACT)
        attention.zero_grad(), whole.zero_grad()
        (got[0] * x).sum().backward(), (want[0] * x).sum().backward()
        reduce_partial_gradients(attention, table, group)
        torch.testing.assert_close(mine.grad, other.grad, **EXACT)
        assert_same_gradients(attention, table, whole)


@pytest.mark.parametrize("layer", ["column", "row", "embedding", "attention"])
def test_without_a_mesh_layers_are_torch_bit_for_bit(layer):
    pairs = {
        "column": (ColumnParallelLinear(5, 7), nn.Linear(5, 7), (torch.randn(3, 5),)),
        "row": (RowParallelLinear(5, 7, bias=False), nn.Linear(5, 7, bias=False), (torch.randn(3, 5),)),
        "embedding": (
            VocabParallelEmbedding(11, 3, padding_idx=1),
            nn.Embedding(11, 3, padding_idx=1),
            (torch.arange(11),),
        ),
        "attention": (ParallelMultiheadAttention(8, 2), nn.MultiheadAttention(8, 2), (torch.randn(4, 2, 8),) * 3),
    }
    ours, theirs, inputs = pairs[layer]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    got, want = ours(*inputs), theirs(*inputs)
    assert torch.equal(got[0], want[0]) if layer == "attention" else torch.equal(got, want)


LOSSES = [
    {},
    {"ignore_index": 5},
    {"label_smoothing": 0.1},
    {"weighted": True},
    {"weighted": True, "label_smoothing": 0.2, "ignore_index": 2},
]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", LOSSES, ids=str)
@run_ranks(tensor=3)
def test_cross_entropy_over_a_split_odd_vocabulary_matches_torch(mesh, options, reduction):
    options, vocabulary, group = dict(options), 301, tensor_group(mesh)
    weight = random_tensor(vocabulary, seed=5).abs() if options.pop("weighted", False) else None
    logits = random_tensor(2, 6, vocabulary) * 3
    target = torch.tensor([[0, 5, 2, 300, 255, 5], [256, 128, 127, 2, 5, 7]])
    options = {"ignore_index": -100, **options, "reduction": reduction, "weight": weight}
    start, held = local_vocabulary(vocabulary, group)
    local = F.pad(logits[..., start : start + held], (0, 128 - held)).requires_grad_()
    whole = logits.clone().requires_grad_()
    got = vocab_parallel_cross_entropy(local, target, group=group, vocabulary=vocabulary, **options)
    want = F.cross_entropy(whole.view(-1, vocabulary), target.view(-1), **options).view(got.shape)
    torch.testing.assert_close(got, want, **EXACT)
    scale = random_tensor(*want.shape, seed=8)
    (got * scale).sum().backward(), (want * scale).sum().backward()
    torch.testing.assert_close(local.grad[..., :held], whole.grad[..., start : start + held], **EXACT)
    assert not local.grad[..., held:].any()


def shift(logits):
    return logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])


USES = {
    "mean over tokens": lambda z, y: F.cross_entropy(z.view(-1, z.size(-1)), y.view(-1)),
    "criterion object": lambda z, y: nn.CrossEntropyLoss(label_smoothing=0.1)(z.flatten(0, 1), y.flatten()),
    "classes second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "permuted": lambda z, y: F.cross_entropy(z.permute(0, 2, 1), y, reduction="sum"),
    "shifted slice": lambda z, y: F.cross_entropy(shift(z.float().double()), y[..., 1:].reshape(-1)),
    "one token": lambda z, y: F.cross_entropy(z[0, 0], y[0, 0]),
    "masked tokens": lambda z, y: F.cross_entropy(z[y > 3], y[y > 3]),
    "capped": lambda z, y: F.cross_entropy((torch.tanh(z / 5.0) * 5.0).reshape(-1, z.shape[-1]), y.reshape(-1)),
    "in place": lambda z, y: z.clone().mul_(2.0).sum(-1),
    "matmul": lambda z, y: z @ torch.ones(z.shape[-1], 2, dtype=z.dtype),
    "two logits": lambda z, y: (z * z).sum(),
    "gather": lambda z, y: z.gather(-1, y.unsqueeze(-1)),
}
WHOLE_USES = {
    "log_softmax": lambda z, y: z.log_softmax(-1)[..., :7],
    "argmax": lambda z, y: z.argmax(-1).double(),
    "class indexing": lambda z, y: z[:, 1:, 3] + z[:, 1:, 299],
    "soft targets": lambda z, y: F.cross_entropy(z[0], torch.full((6, z.shape[-1]), 1 / z.shape[-1], dtype=z.dtype)),
    "topk": lambda z, y: torch.topk(z, 3).values,
    "assignment": lambda z, y: banned(z).logsumexp(-1),
}


def banned(z):
    z = z.clone()
    z[..., 5] = -1.0
    z[..., 300] = -2.0
    return z


@pytest.mark.parametrize("use", list(USES) + list(WHOLE_USES))
@run_ranks(tensor=2)
def test_split_logits_behave_like_whole_ones(mesh, use):
    torch.manual_seed(0)
    head = ColumnParallelLinear(6, 301).double()
    whole = copy.deepcopy(head)
    table = head.shard_(mesh, output="logits")
    x, y = random_tensor(2, 6, 6), torch.tensor([[0, 5, 2, 300, 255, 5], [256, 128, 127, 2, 5, 7]])
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    function = {**USES, **WHOLE_USES}[use]
    logits = head(mine)
    assert isinstance(logits, VocabParallelLogits) and logits.shape == (2, 6, 301) and logits.local().shape[-1] == 256
    with count_collectives() as counts:
        got = function(logits, y)
    assert (counts["all_gather_single"] == 0) == (use in USES), counts
    want = function(whole(other), y)
    if isinstance(got, VocabParallelLogits):
        got = got.full()
    assert not isinstance(got, VocabParallelLogits)
    torch.testing.assert_close(got, want, **({"rtol": 1e-6, "atol": 1e-6} if use == "shifted slice" else EXACT))
    if not want.requires_grad:
        return
    scale = random_tensor(*want.shape, seed=8)
    (got * scale).sum().backward(), (want * scale).sum().backward()
    if use != "shifted slice":
        torch.testing.assert_close(mine.grad, other.grad, **EXACT)
        assert_same_gradients(head, table, whole)
