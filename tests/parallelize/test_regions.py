"""What happens inside split regions: random streams, recomputation, compilation, precision, overlap, sharing."""

from __future__ import annotations

import copy
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_megatron.layers import (
    ColumnParallelLinear,
    ParallelMLP,
    ParallelMultiheadAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLogits,
)
from lightning_megatron.layers.multiply import products
from lightning_megatron.parallelize import parallelize
from tests.harness import run_ranks
from tests.harness.twins import (
    EXACT,
    FLOAT32_GRADIENTS,
    assert_same_gradients,
    count_collectives,
    random_tensor,
    reduce_partial_gradients,
    tensor_group,
)
from tests.parallelize.models import VOCABULARY, Encoder, NanoGPT, hugging_face, tokens


def everyone(value, group):
    """The same tensor of every rank."""
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value.contiguous(), group=group)
    return parts


@run_ranks(tensor=2)
def test_masks_differ_between_ranks_inside_a_region_and_agree_outside(mesh):
    torch.manual_seed(0)
    mlp = ParallelMLP(8, 16, activation=nn.Identity(), dropout=0.5).double()
    mlp.shard_(mesh)
    seen = []
    mlp.dropout.register_forward_hook(lambda module, args, out: seen.append((out != 0).double()))
    outside = []
    for _ in range(2):
        mlp(torch.ones(64, 8, dtype=torch.float64))
        outside.append(F.dropout(torch.ones(64, 8), 0.5))
    group = tensor_group(mesh)
    for mask in seen:
        first, second = everyone(mask, group)
        assert not torch.equal(first, second)
    assert not torch.equal(seen[0], seen[1])
    for mask in outside:
        first, second = everyone(mask, group)
        assert torch.equal(first, second)


@run_ranks(tensor=2)
def test_region_without_dropout_leaves_the_shared_stream_where_one_process_has_it(mesh):
    torch.manual_seed(0)
    mlp = ParallelMLP(8, 16).double()
    mlp.shard_(mesh)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    mlp(torch.ones(4, 8, dtype=torch.float64))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@run_ranks(tensor=2)
def test_recomputation_replays_the_masks_of_both_streams(mesh, sequence_parallel, reentrant):
    gradients = []
    for recompute in (False, True):
        module = hugging_face("gpt2", dropout=0.3).train()
        report = parallelize(module, mesh, sequence_parallel=sequence_parallel)
        if recompute:
            with warnings.catch_warnings():  # the name that every release knows
                warnings.simplefilter("ignore", FutureWarning)
                module.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(7)
        for seed in range(2):
            module(input_ids=tokens(seed=seed), labels=tokens(seed=seed)).loss.backward()
        reduce_partial_gradients(module, report.parameters, tensor_group(mesh))
        gradients.append({name: p.grad for name, p in module.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, **EXACT)


@run_ranks(tensor=2)
def test_recomputing_part_of_a_region_leaves_nothing_open(mesh):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return x + self.down(self.drop(F.gelu(self.up(x))))

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(3)])
            self.recompute = False

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            return x

    torch.manual_seed(0)
    first = Stack().double()
    second = copy.deepcopy(first)
    second.recompute = True
    results = []
    for module in (first, second):
        parallelize(module, mesh, example=random_tensor(2, 8))
        torch.manual_seed(3)
        module(random_tensor(4, 8)).square().sum().backward()
        results.append([p.grad for p in module.parameters()] + [torch.rand(2)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@run_ranks(tensor=2)
def test_all_reduce_of_the_input_gradient_runs_while_the_weight_gradient_is_computed(mesh):
    layer = ColumnParallelLinear(6, 8).double()
    layer.shard_(mesh)
    events = []
    start, multiply = products.start_all_reduce, products.PendingProducts.take

    class Watched:
        def __init__(self, work):
            self.work = work

        def wait(self):
            events.append("wait")
            self.work.wait()

    def starting(grad, group):
        events.append("start")
        total, work = start(grad, group)
        return total, Watched(work)

    def multiplying(pending, index, dtype):
        events.append("product")
        return multiply(pending, index, dtype)

    with (
        mock.patch.object(products, "start_all_reduce", starting),
        mock.patch.object(products.PendingProducts, "take", multiplying),
    ):
        layer(random_tensor(3, 6).requires_grad_()).sum().backward()
    assert events == ["start", "product", "wait"]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@run_ranks(tensor=2)
def test_compiled_layers_compute_what_plain_ones_do(mesh, sequence_parallel):
    torch.manual_seed(0)
    module = Encoder().double()
    whole = copy.deepcopy(module)
    report = parallelize(module, mesh, sequence_parallel=sequence_parallel)
    for index in range(2):
        module.layers[index] = torch.compile(module.layers[index], backend="aot_eager")
    with warnings.catch_warnings():  # the compiler's own, about gradients of intermediate tensors
        warnings.simplefilter("ignore")
        loss = F.cross_entropy(module(tokens()).transpose(1, 2), tokens())
        loss.backward()
    expected = F.cross_entropy(whole(tokens()).transpose(1, 2), tokens())
    expected.backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    for index in range(2):
        module.layers[index] = module.layers[index]._orig_mod
    reduce_partial_gradients(module, report.parameters, tensor_group(mesh))
    assert_same_gradients(module, report.parameters, whole)


@pytest.mark.parametrize("autocast", [False, True])
@run_ranks(tensor=2)
def test_bfloat16_stays_close_to_one_process(mesh, autocast):
    module = hugging_face("llama").float() if autocast else hugging_face("llama").to(torch.bfloat16)
    whole = copy.deepcopy(module)
    report = parallelize(module, mesh)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with count_collectives() as counts:
            loss = module(input_ids=tokens(), labels=tokens()).loss
            loss.backward()
        expected = whole(input_ids=tokens(), labels=tokens()).loss
    expected.backward()
    assert dict(counts) == {"all_reduce": 12}
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
    norm = {}
    for name, p in whole.named_parameters():
        local = module.get_parameter(name)
        assert local.grad.dtype == local.dtype
        norm[name] = (report.spec(name).slice_full(p.grad) - local.grad).norm() / p.grad.norm()
    assert max(norm.values()) < 0.1, norm


class Wrapped(LightningModule):
    """A LightningModule around some model; its own forward is Lightning's default."""

    def __init__(self, model, options=None):
        super().__init__()
        self.model = model
        self.options = options or {}

    def training_step(self, batch, index):
        if hasattr(self.model, "config"):
            return self.model(input_ids=batch, labels=batch).loss
        return self.model(batch, batch.roll(-1, 1))[1]


@pytest.mark.parametrize("kind", ["nanoGPT", "bloom", "llama"])
@run_ranks(tensor=2)
def test_model_inside_a_lightning_module_is_found(mesh, kind):
    torch.manual_seed(0)
    module = Wrapped(NanoGPT().double() if kind == "nanoGPT" else hugging_face(kind))
    whole = copy.deepcopy(module)
    report = parallelize(module, mesh)
    module.training_step(tokens(), 0).backward()
    whole.training_step(tokens(), 0).backward()
    reduce_partial_gradients(module, report.parameters, tensor_group(mesh))
    assert_same_gradients(module, report.parameters, whole, EXACT if kind == "nanoGPT" else FLOAT32_GRADIENTS)
    assert any(not sharding.replicated for sharding in report.parameters.values())


class DropIn(nn.Module):
    """A user's own model that asked for parallel layers by an import line."""

    def __init__(self):
        super().__init__()
        self.embed = VocabParallelEmbedding(VOCABULARY, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = ParallelMultiheadAttention(16, 4, batch_first=True, num_key_value_heads=2)
        self.mlp = ParallelMLP(16, 24, gated=True)
        self.query = ColumnParallelLinear(16, 32)
        self.out = RowParallelLinear(32, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        x = self.embed(ids)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.mlp(x)
        x = x + self.out(F.silu(self.query(x)))
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


@run_ranks(tensor=2)
def test_drop_in_layers_are_their_own_plan(mesh):
    torch.manual_seed(0)
    module = DropIn().double()
    whole = copy.deepcopy(module)
    report = parallelize(module, mesh)
    assert report.source == "drop-in layers"
    logits, loss = module(tokens(), tokens())
    assert isinstance(logits, VocabParallelLogits)
    loss.backward()
    whole(tokens(), tokens())[1].backward()
    reduce_partial_gradients(module, report.parameters, tensor_group(mesh))
    assert_same_gradients(module, report.parameters, whole)


@run_ranks(tensor=2)
def test_accumulated_and_frozen_gradients_match(mesh):
    module = hugging_face("llama")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("norm" not in name and "q_proj" not in name and "embed" not in name)
    whole = copy.deepcopy(module)
    report = parallelize(module, mesh)
    for seed in range(3):
        module(input_ids=tokens(seed=seed), labels=tokens(seed=seed)).loss.backward()
        whole(input_ids=tokens(seed=seed), labels=tokens(seed=seed)).loss.backward()
    reduce_partial_gradients(module, report.parameters, tensor_group(mesh))
    assert module.model.layers[0].self_attn.q_proj.weight.grad is None
    assert_same_gradients(module, report.parameters, whole, FLOAT32_GRADIENTS)


@run_ranks(tensor=2)
def test_generation_from_split_logits_is_that_of_one_process(mesh):
    module = hugging_face("gpt2").eval()
    whole = copy.deepcopy(module)
    parallelize(module, mesh)
    prompt = tokens(length=4)
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    assert torch.equal(module.generate(prompt, **options), whole.generate(prompt, **options))


@run_ranks(tensor=2)
def test_copy_of_a_split_module_computes_on_its_own(mesh):
    torch.manual_seed(0)
    module = NanoGPT().double()
    report = parallelize(module, mesh)
    twin = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.data.mul_(1.5)
    torch.manual_seed(0)
    whole = NanoGPT().double()
    loss = twin(tokens(), tokens())[1]
    loss.backward()
    expected = whole(tokens(), tokens())[1]
    expected.backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    assert_same_gradients(twin, report.parameters, whole)
    assert all(parameter.grad is None for parameter in module.parameters())


@run_ranks(tensor=2)
def test_printing_and_detaching_split_logits_sends_nothing(mesh):
    head = ColumnParallelLinear(4, VOCABULARY)
    head.shard_(mesh, output="logits")
    logits = head(torch.randn(2, 3, 4))
    with count_collectives() as counts:
        assert "VocabParallelLogits" in f"{logits} {logits!r}" and logits.requires_grad and not logits.is_leaf
        kept = {"logits": torch.detach(logits), "same": logits.cpu().clone()}
        assert all(isinstance(value, VocabParallelLogits) for value in kept.values())
        assert not kept["logits"].requires_grad and len(kept["same"]) == 2
    assert not counts


class Staying(nn.Module):
    """Linear layers of neighbours in a list are pairs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.left_out = set()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Dropping(Staying):
    """The same layers, of which some are left out."""

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index in self.left_out:
                continue
            x = layer(x)
        return x


@run_ranks(tensor=2)
def test_pairs_over_layers_are_exact_whichever_of_them_code_leaves_out(mesh):
    torch.manual_seed(0)
    module = Dropping().double()
    whole, x = copy.deepcopy(module), random_tensor(3, 8)
    report = parallelize(module, mesh, example=x)
    staying = Staying().double()
    parallelize(staying, mesh, example=x)
    with count_collectives() as counts:
        staying(x)
    assert sum(counts.values()) == 2, f"pairs that always run gather nothing: {counts}"
    for left_out in ({0}, {1}, {2}, {3}, {1, 2}, {0, 2}):
        module.left_out = whole.left_out = left_out
        given = [x.clone().requires_grad_() for _ in range(2)]
        for copied, mine in zip((module, whole), given, strict=True):
            copied.zero_grad()
            copied(mine).square().sum().backward()
        torch.testing.assert_close(given[0].grad, given[1].grad, **EXACT)
        assert_same_gradients(module, report.parameters, whole)
