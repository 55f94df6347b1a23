"""Recomputation by name, by number and of attention alone: the same gradients from fewer saved tensors."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from lightning_megatron.pipeline.cut.trunk import LayersHere
from lightning_megatron.pipeline.forwards.recompute import RecomputedCall, check_recompute, recompute_layers


class Layer(nn.Module):
    """Fused attention and an MLP, with dropout."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.fused = fused
        self.qkv = nn.Linear(8, 24)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3)
        else:
            mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        return x + scale * self.mlp(x + mixed)


class Net(nn.Module):
    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(fused) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


class Saved:
    """Counts elements that autograd saves besides parameters."""

    def __init__(self, net: nn.Module) -> None:
        self.own = {parameter.data_ptr() for parameter in net.parameters()}
        self.elements = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in self.own:
            self.elements += tensor.numel()
        return tensor


def train(recompute: Any, fused: bool = True) -> tuple[list[Tensor], int, dict[str, int]]:
    """Gradients, elements saved in forward, and how often each linear of a layer ran."""
    torch.manual_seed(0)
    net, calls = Net(fused).double(), {name: itertools.count() for name in ("qkv", "mlp")}
    for layer in net.layers:
        for name in calls:

            def count(*_: Any, name: str = name) -> None:
                next(calls[name])  # a number would be put back after the recomputation

            (layer.qkv if name == "qkv" else layer.mlp[0]).register_forward_hook(count)
    recompute_layers(LayersHere(net), recompute)
    x, saved = torch.randn(2, 5, 8, dtype=torch.float64), Saved(net)
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        loss = net(x).square().sum()
    torch.rand(3)
    loss.backward()
    return (
        [parameter.grad for parameter in net.parameters()],
        saved.elements,
        {name: next(count) for name, count in calls.items()},
    )


@pytest.mark.parametrize(
    ("recompute", "runs"),
    [
        ("full", {"qkv": 8, "mlp": 8}),
        ({"every": 2}, {"qkv": 6, "mlp": 6}),
        (["layers.1", "layers.3"], {"qkv": 6, "mlp": 6}),
        (["*.mlp"], {"qkv": 4, "mlp": 8}),
        (["layers.0", "layers.0.mlp"], {"qkv": 5, "mlp": 5}),
        ("selective", {"qkv": 4, "mlp": 4}),
    ],
    ids=str,
)
def test_gradients_stay_and_saved_activations_go(recompute: Any, runs: dict[str, int]) -> None:
    plain, everything, _ = train(None)
    grads, saved, calls = train(recompute)
    assert all(torch.equal(one, other) for one, other in zip(grads, plain, strict=True)), "dropout is replayed"
    assert calls == runs
    assert saved < everything


def test_a_second_installation_replaces_the_first() -> None:
    net = Net()
    for recompute in ("full", "selective", ["*.mlp"], None):
        recompute_layers(LayersHere(net), recompute)
    assert all(module.forward.__func__ is type(module).forward for module in net.modules())


def test_selective_says_what_it_looked_for_where_there_is_none() -> None:
    with pytest.raises(RuntimeError, match=r"scaled_dot_product_attention.*'full'"):
        train("selective", fused=False)


class Checkpointed(Layer):
    """Recomputes itself."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return checkpoint(super().forward, x, scale, use_reentrant=False)


@pytest.mark.parametrize("recompute", ["selective", "full", ["*.mlp"]])
def test_layers_that_recompute_themselves_give_the_same_gradients(recompute: Any) -> None:
    def gradients(recompute: Any) -> list[Tensor]:
        torch.manual_seed(0)
        net, x = Net(), torch.randn(2, 5, 8)
        net.layers = nn.ModuleList(Checkpointed() for _ in range(2))
        recompute_layers(LayersHere(net), recompute)
        net(x).square().sum().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    found, wanted = gradients(recompute), gradients(None)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def test_a_pattern_that_matches_nothing_lists_names() -> None:
    net = Net()
    with pytest.raises(ValueError, match=r"'\*\.attention'.*layers\.0\.qkv"):
        recompute_layers(LayersHere(net), ["*.attention"])


@pytest.mark.parametrize("wrong", ["all", {"every": 0}, {"each": 2}, [], [1], 3, {"every": True}])
def test_other_values_are_refused_with_the_choices(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"activation_recompute.*'selective'"):
        check_recompute(wrong)


def test_a_key_value_cache_is_not_filled_twice() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=11,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 11, (2, 6))
    model(input_ids=tokens, labels=tokens).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    recompute_layers(LayersHere(model), "full")
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(torch.allclose(p.grad, e, atol=1e-6) for p, e in zip(model.parameters(), expected, strict=True))


class Summing(nn.Module):
    """Adds to a sum that the step sets back, and to a list that it empties."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(3, 3), seen
        self.total: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        self.total = self.total + x.square().mean()
        self.seen.append(x.mean())
        return torch.sin(x)  # whose backward needs the forward to its end


def test_what_a_layer_adds_up_is_added_once_though_it_runs_twice() -> None:
    torch.manual_seed(0)
    gradients = []
    for recompute in (False, True):
        seen: list[Tensor] = []
        layer = Summing(seen)
        nn.init.constant_(layer.linear.weight, 0.3)
        nn.init.zeros_(layer.linear.bias)
        if recompute:
            RecomputedCall(layer).install()
        for step in range(3):
            loss = layer(torch.full((2, 3), 1.0 + step)).sum() + layer.total + sum(seen)
            layer.total = 0.0
            seen.clear()
            loss.backward()
            assert layer.total == 0.0 and not seen
        gradients.append(layer.linear.weight.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


class Following(nn.Module):
    """Counts its calls, follows what it sees in buffers, in place and anew, and computes with all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = spectral_norm(nn.Linear(3, 3)), nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.sin(self.norm(torch.tanh(self.linear(x))) * self.mean / self.calls)


@pytest.mark.parametrize("frozen_first", [False, True])
def test_a_recomputation_sees_the_state_that_its_forward_saw_and_leaves_the_latest(frozen_first: bool) -> None:
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        layer = Following().double()
        if recompute:
            RecomputedCall(layer).install()
        if frozen_first:
            layer.eval()(torch.rand(4, 3, dtype=torch.float64)).sum().backward()
            layer.zero_grad()
        layer.train()
        inputs = torch.rand(3, 4, 3, dtype=torch.float64)
        losses = [layer(x).sum() for x in inputs[:2]]  # two in flight
        losses[0].backward()
        losses.append(layer(inputs[2]).sum())
        for loss in losses[1:]:
            loss.backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        found.append([*losses, *gradients, *layer.buffers(), torch.tensor(layer.calls)])
    if frozen_first:  # power iterations that begin later: what they wrote into is known from the second call on
        found = [[*one[:3], *one[-5:]] for one in found]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


class Stochastic(nn.Module):
    """Is left out, and scaled, as Python's and NumPy's generators have it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        if random.random() < 0.4:
            return x
        return x + self.up(x).tanh() * np.random.rand() * scale


def test_draws_from_pythons_and_numpys_generators_are_drawn_again_and_no_further() -> None:
    found = []
    for recompute in (None, "full"):
        torch.manual_seed(0)
        net = Net()
        net.layers = nn.ModuleList([Stochastic() for _ in range(8)])
        recompute_layers(LayersHere(net), recompute)
        random.seed(3)
        np.random.seed(3)
        outputs = [net(torch.ones(2, 8) * scale) for scale in (1.0, 2.0)]
        between = random.random()
        sum(output.square().sum() for output in outputs).backward()
        grads = [torch.zeros(8, 8) if p.grad is None else p.grad for p in net.parameters()]
        found.append((grads, between, random.random(), np.random.rand()))
    (plain, *numbers), (recomputed, *others) = found
    assert numbers == others
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))
