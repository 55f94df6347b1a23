"""Activations in host memory: the bits of a run without, the bytes of a formula, and layers that are refused."""

from __future__ import annotations

import copy
import functools
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.mesh.messages.host_link import Copy, HostLink
from lightning_megatron.pipeline.cut.trunk import LayersHere
from lightning_megatron.pipeline.forwards.factors import Factors, add_up
from lightning_megatron.pipeline.forwards.recompute import recompute_layers
from lightning_megatron.pipeline.forwards.weight_gradients import WeightGradients
from lightning_megatron.strategy.activations.host_copies import Traffic
from lightning_megatron.strategy.activations.host_request import host_request
from lightning_megatron.strategy.activations.install import keep_on_host
from lightning_megatron.strategy.activations.token_rows import NotTokenwise
from tests.activations import layers as kinds
from tests.harness.memory import live_storages

BATCH, TOKENS, LAYERS = 3, 19, 4
TALKING = "talking", {"tokens": 0.4}  # scores that a linear of heads mixes are not followed by products of its own
TOKENWISE = {
    "block": kinds.Block,
    "dropout": functools.partial(kinds.Block, 0.3, 0.2),
    "rotary": kinds.RotatedWindow,
    "torch's": kinds.TorchsLayer,
    "positions": kinds.Positions,
    "by hand": kinds.ByHand,
    "heads by hand": kinds.Heads,
    "one key": kinds.OneKey,
    "capped": kinds.Capped,
    "talking": kinds.Talking,
    "alibi": kinds.Alibi,
}
OTHERS = {
    "kthvalue": kinds.Judged,
    "conv1d": kinds.Convolution,
    "mean": kinds.Pooled,
    "__getitem__": kinds.Shifted,
    "autograd.Function": kinds.CustomFunction,
    "torch.utils.checkpoint": kinds.Checkpointed,
    "randn_like": kinds.Noisy,
}


class Words(nn.Module):
    """A language model."""

    def __init__(self, layer, first: bool = True) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, kinds.WIDTH), nn.Linear(kinds.WIDTH, 50)
        self.layers, self.first = nn.ModuleList(layer() for _ in range(LAYERS)), first

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x if self.first else x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x if self.first else x.transpose(0, 1))


def words() -> Tensor:
    return torch.randint(0, 50, (BATCH, TOKENS), generator=torch.Generator().manual_seed(3))


def train(model: nn.Module, offload, link: HostLink | None = None, steps: int = 3):
    """Losses and gradients of some steps, and what counted the copies."""
    model = copy.deepcopy(model)
    traffic = keep_on_host(model, None, "auto", host_request(offload), link or HostLink())
    tokens, losses = words(), []
    for step in range(steps):
        torch.manual_seed(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters()}, traffic, model


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("offload", ["all", {"tokens": 0.4}], ids=str)
def test_layers_that_save_what_they_give_leave_nothing_behind_a_step(offload):
    """The products of `Heads` end in a tanh; with tokens its later rows run again in a graph without a backward."""
    model, tokens, held = Words(kinds.Heads), words(), []
    keep_on_host(model, None, "auto", host_request(offload), HostLink())
    for _ in range(3):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        model.zero_grad()
        held.append(sum(storage.nbytes() for storage in live_storages().values()))
    assert held[1] == held[2]


def built(layer) -> nn.Module:
    return Words(layer)


def same(found, wanted, exactly: bool) -> None:
    assert found[0] == wanted[0] if exactly else found[0] == pytest.approx(wanted[0], rel=1e-12)
    for name, value in wanted[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=0 if exactly else 1e-10, atol=0 if exactly else 1e-12)


ANY = {**TOKENWISE, **OTHERS, "conjugates": kinds.Conjugates}


@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("offload", ["all", {"every": 2}, ["layers.1", "*.3"]], ids=str)
def test_any_layer_in_host_memory_gives_the_bits_of_a_run_without(name, offload):
    model = built(ANY[name])
    same(train(model, offload), train(model, None), exactly=True)


@pytest.mark.everyday(15)
@pytest.mark.parametrize("name", TOKENWISE)
@pytest.mark.parametrize("share", [0, 0.05, 0.4, 0.9, 0.99])
def test_some_tokens_in_host_memory_and_others_computed_again_give_the_same_gradients(name, share):
    model = built(TOKENWISE[name])
    same(train(model, {"tokens": share}), train(model, None), exactly=False)


def test_tokens_may_lie_in_front_of_the_batch():
    model = Words(functools.partial(kinds.TorchsLayer, batch_first=False), first=False)
    same(train(model, {"tokens": 0.4}), train(model, None), exactly=False)


def test_heads_that_talk_are_refused_where_gradients_of_weights_are_put_off():
    model = built(kinds.Talking)
    keep_on_host(model, None, "auto", host_request({"tokens": 0.4}), HostLink())
    with WeightGradients(model.layers).installed(), pytest.raises(NotTokenwise, match="`matmul` reads other tokens"):
        model(words())


@pytest.mark.parametrize(
    ("name", "offload"),
    [(name, offload) for name in TOKENWISE for offload in ("all", {"tokens": 0.4}) if (name, offload) != TALKING],
    ids=str,
)
def test_gradients_of_weights_may_be_put_off(name, offload):
    """As schedules do that split the backward, here in every second step."""
    model = built(TOKENWISE[name])
    wanted, made = train(model, None), copy.deepcopy(model)
    keep_on_host(made, None, "auto", host_request(offload), HostLink())
    products, tokens, losses = WeightGradients(made.layers), words(), []
    for step in range(3):
        torch.manual_seed(step)
        put_off: list[Factors] = []
        with products.installed() if step != 1 else nullcontext(), products.putting_off(put_off):
            loss = F.cross_entropy(made(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
        assert bool(put_off) == (step != 1)
        add_up(put_off)
        losses.append(loss.item())
    same((losses, {name: p.grad for name, p in made.named_parameters()}), wanted, exactly=False)


RECOMPUTED = ["full", {"every": 2}, "selective", ["*.down", "*.up"]]


@pytest.mark.parametrize("recompute", RECOMPUTED, ids=str)
@pytest.mark.parametrize("name", ["block", "dropout", "conv1d", "mean"])
def test_what_recomputation_leaves_may_lie_in_host_memory(name, recompute):
    model = built({**TOKENWISE, **OTHERS}[name])
    if name in OTHERS and not isinstance(recompute, dict):
        recompute = "full"
    recompute_layers(LayersHere(model, "auto"), recompute)
    found = train(model, "all")
    assert found[2].returned > 0
    same(found, train(model, None), exactly=recompute != "selective")  # products of operands that lie otherwise


def test_of_recomputed_layers_the_host_has_the_inputs():
    model = built(kinds.Block)
    recompute_layers(LayersHere(model, "auto"), "full")
    traffic = train(model, "all")[2]
    size = BATCH * TOKENS * kinds.WIDTH * 8
    assert all(sum(kinds_of.values()) == size for kinds_of in traffic.kept.values())
    assert traffic.most == LAYERS * size and traffic.most_out == 2 * size


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_is_not_token_by_token_is_refused_by_what_it_does(name):
    with pytest.raises(NotTokenwise, match=f"`layers.0` on some of its tokens.*{name}.*activation_offload='all'"):
        train(built(OTHERS[name]), {"tokens": 0.4})


def test_counters_and_buffers_of_a_layer_are_those_of_a_run_without():
    model = built(kinds.RotatedWindow)
    assert [layer.calls for layer in train(model, {"tokens": 0.4})[3].layers] == [3] * LAYERS


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 1])
def test_bytes_are_those_of_the_formula(share):
    model = built(kinds.Block)
    kept = train(model, "all")[2].kept["layers.1"]
    traffic: Traffic = train(model, {"tokens": share})[2]
    numbers, width, heads = 8 * BATCH, kinds.WIDTH, kinds.HEADS
    # x; o and its log-sums; and of the rest, per token: two norms' means and deviations, the first linear's input,
    # q, k, v, x + attention, the inputs of the second and third linear, and of GELU.
    inputs, attention = numbers * TOKENS * width, numbers * TOKENS * (width + heads)
    others = numbers * (4 + (1 + 3 + 1 + 1 + 2 + 2) * width)
    rows = math.ceil(share * TOKENS)
    assert sum(kept.values()) == inputs + attention + TOKENS * others
    for name in ("layers.0", "layers.3"):
        found = traffic.kept[name]
        assert found["input"] == inputs
        assert sum(found.values()) == inputs + attention + rows * others
        assert traffic.replayed.get(name) == (None if share == 1 else (TOKENS - rows, TOKENS))
    assert (traffic.held, traffic.out) == (0, 0)


class Attentions(TorchDispatchMode):
    """Counts attention, wherever it is computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def test_attention_is_computed_as_often_as_in_the_forward():
    with Attentions() as attentions:
        train(built(kinds.Block), {"tokens": 0.3}, steps=2)
    assert attentions.count == 2 * LAYERS


class Squares(TorchDispatchMode):
    """Counts the functions that compute numbers of the shape of scores."""

    count, names = 0, ("bmm", "baddbmm", "_softmax", "exp", "tanh", "add", "mul", "where", "masked_fill", "amax")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.device.type != "meta" and func.overloadpacket.__name__ in self.names:
            self.count += found.ndim > 2 and found.shape[-1] == TOKENS and found.shape[-2] in (TOKENS, 13)
        return found


@pytest.mark.parametrize("name", ["by hand", "heads by hand", "capped", "alibi"])
def test_scores_of_attention_by_hand_are_not_computed_again(name):
    counts = []
    for offload in (None, {"tokens": 0.3}):  # 6 of 19 tokens are kept, 13 computed again
        model = built(TOKENWISE[name])
        traffic = keep_on_host(model, None, "auto", host_request(offload), HostLink())
        tokens = torch.randint(0, 50, (BATCH, TOKENS))
        model(tokens).sum().backward()
        loss = model(tokens).sum()
        with Squares() as squares:
            loss.backward()
        counts.append(squares.count)
    assert counts[0] == counts[1] > 0 and traffic.replayed["layers.0"] == (13, TOKENS)


def test_bytes_of_attention_by_hand_are_those_of_the_formula():
    share, model = 0.4, built(kinds.Heads)
    found = train(model, {"tokens": share})[2].kept["layers.1"]
    numbers, width, heads = 8 * BATCH, kinds.WIDTH, kinds.HEADS
    # The softmax's result, what dropout multiplies it with, and the product of both; the mask is of one byte.
    scores = 3 * numbers * heads * TOKENS**2 + TOKENS**2
    attention = numbers * TOKENS * width + scores
    # norm's mean and deviation, the first linear's input, q, k, v, the input of the second linear, tanh's result
    others = numbers * (2 + (1 + 3 + 1 + 1) * width)
    assert found["input"] == numbers * TOKENS * width
    assert (found["attention"], found["other"]) == (attention, math.ceil(share * TOKENS) * others)


class Told(HostLink):
    """Writes down what is copied where to."""

    def __init__(self) -> None:
        self.copies: list[int] = []

    def start(self, target: Tensor, source: Tensor) -> Copy:
        self.copies.append(target.nbytes)
        return super().start(target, source)


@pytest.mark.parametrize("offload", ["all", {"tokens": 0.4}], ids=str)
def test_every_byte_goes_and_comes_back_once_and_two_layers_are_on_the_device(offload):
    link = Told()
    model = built(kinds.Block)
    first = train(model, offload, Told(), steps=1)[2]
    traffic = train(model, offload, link, steps=4)[2]
    assert traffic.sent + traffic.returned == sum(link.copies)
    assert (traffic.sent - first.sent) == (traffic.returned - first.returned)
    layer = sum(train(model, "all")[2].kept["layers.0"].values())
    assert traffic.most_out <= 2 * layer


def test_a_module_without_wrappers_runs_as_before():
    model = built(kinds.Block)
    keep_on_host(model, None, "auto", host_request("all"), HostLink())
    assert keep_on_host(model, None, "auto", None, HostLink()) is None
    assert all("forward" not in vars(layer) for layer in model.layers)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"tokens": "most"}, "must be"),
        ("some", "must be None, 'all'"),
        ({"tokens": 1.5}, "from 0 to 1"),
        ({"tokens": True}, "must be"),
        ({"every": 0}, "must be"),
        ({"layers": []}, "must be"),
        ({"every": 2, "tokens": 0.5}, "must be"),
        (0.5, "must be"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_meant_is_refused(value, said):
    with pytest.raises(ValueError, match=said):
        host_request(value)


def test_a_pattern_that_matches_no_layer_is_refused():
    with pytest.raises(ValueError, match=r"names '\*.7', which matches none of the layers layers.0"):
        keep_on_host(built(kinds.Block), None, "auto", host_request({"tokens": 0.5, "layers": ["*.7"]}), HostLink())
