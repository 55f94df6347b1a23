"""Split backwards of linears: the two halves together are what autograd computes in one, hooks included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatron.pipeline.forwards.factors import Factors, add_up
from lightning_megatron.pipeline.forwards.weight_gradients import WeightGradients


class Mixed(nn.Module):
    """A norm, a linear used twice, one whose weight is also used by a function, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.twice, self.shared = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.twice(torch.tanh(self.twice(self.norm(x))))
        return self.frozen(x + self.shared(F.linear(x, self.shared.weight)))


def make() -> tuple[Mixed, Tensor]:
    torch.manual_seed(0)
    return Mixed().double(), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)


def wanted(run: Callable[[Mixed, Tensor], Tensor] = lambda module, x: module(x)) -> dict[str, Tensor | None]:
    module, x = make()
    run(module, x).square().sum().backward()
    return {"x": x.grad, **{name: parameter.grad for name, parameter in module.named_parameters()}}


def test_both_halves_together_are_one_backward() -> None:
    module, x = make()
    split, queue = WeightGradients([module]), list[Factors]()
    with split.installed():
        loss = module(x).square().sum()
        with split.putting_off(queue):
            loss.backward()
    expected = wanted()
    assert x.grad is not None and torch.allclose(x.grad, expected["x"], atol=1e-12)
    assert module.norm.weight.grad is not None, "what is not a linear has its gradient after the first half"
    assert module.twice.weight.grad is None and module.twice.bias.grad is None
    assert len(queue) == 3, "the frozen linear has nothing to put off"
    add_up(queue)
    assert not queue
    for name, parameter in module.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
        else:
            assert torch.allclose(parameter.grad, expected[name], atol=1e-12), name


def test_products_are_added_to_gradients_that_are_there() -> None:
    module, x = make()
    before = {}
    for name, parameter in module.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        before[name] = parameter.grad
    split, queue = WeightGradients([module]), list[Factors]()
    with split.installed(), split.putting_off(queue):
        module(x).square().sum().backward()
    add_up(queue)
    for name, grad in wanted().items():
        if grad is not None and name != "x":
            assert torch.allclose(before[name] - 1, grad, atol=1e-12), name


def test_hooks_run_once_per_parameter_when_its_last_product_is_there() -> None:
    module, x = make()
    seen: list[tuple[str, bool]] = []
    for name, parameter in module.twice.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad is not None)))
    split, queue = WeightGradients([module.twice]), list[Factors]()
    with split.installed(), split.putting_off(queue):
        module(x).square().sum().backward()
    assert not seen
    add_up(queue)
    assert sorted(seen) == [("bias", True), ("weight", True)]
    assert torch.allclose(module.twice.weight.grad, wanted()["twice.weight"], atol=1e-12)


def test_a_recomputed_layer_is_recomputed_once_for_both_halves() -> None:
    module, x = make()
    runs: list[int] = []
    module.twice.register_forward_hook(lambda *_: runs.append(1))
    split, queue = WeightGradients([module]), list[Factors]()
    with split.installed():
        loss = checkpoint(module, x, use_reentrant=False).square().sum()
        with split.putting_off(queue):
            loss.backward()
        add_up(queue)
    assert len(runs) == 4, "two calls forward, two again in backward"
    assert torch.allclose(module.twice.weight.grad, wanted()["twice.weight"], atol=1e-12)


def test_the_first_linear_of_all_has_a_weight_gradient_too() -> None:
    linear = nn.Linear(4, 2)
    x = torch.randn(3, 4)
    split, queue = WeightGradients([linear]), list[Factors]()
    with split.installed(), split.putting_off(queue):
        linear(x).sum().backward()
    add_up(queue)
    assert torch.allclose(linear.weight.grad, x.sum(0).expand(2, 4))
    assert torch.allclose(linear.bias.grad, torch.full((2,), 3.0))


def test_a_transposed_linear_of_hugging_face_is_split_as_well() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(5, 4).double()
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    conv1d(x).square().sum().backward()
    grads = [conv1d.weight.grad.clone(), conv1d.bias.grad.clone(), x.grad.clone()]
    conv1d.zero_grad()
    x.grad = None
    split, queue = WeightGradients([conv1d]), list[Factors]()
    with split.installed(), split.putting_off(queue):
        conv1d(x).square().sum().backward()
    assert conv1d.weight.grad is None
    add_up(queue)
    for got, expected in zip((conv1d.weight.grad, conv1d.bias.grad, x.grad), grads, strict=True):
        assert torch.allclose(got, expected, atol=1e-12)


def test_under_autocast_the_products_have_autocasts_precision_and_the_gradients_the_weights() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x).float().square().sum().backward()
    expected, linear.weight.grad = linear.weight.grad, None
    split, queue = WeightGradients([linear]), list[Factors]()
    with split.installed(), split.putting_off(queue):
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
    add_up(queue)
    assert linear.weight.grad.dtype == torch.float32
    assert torch.allclose(linear.weight.grad, expected, rtol=2e-2, atol=2e-2)


def test_afterwards_every_linear_is_what_it_was() -> None:
    module, x = make()
    split = WeightGradients([module])
    with pytest.raises(RuntimeError, match="splits backwards"), split.installed():
        module(x).sum().backward()
    assert all("forward" not in child.__dict__ for child in module.modules())
    module(x).square().sum().backward()
    assert torch.allclose(module.shared.weight.grad, wanted()["shared.weight"], atol=1e-12)


def test_subclasses_with_a_forward_of_their_own_and_reparametrized_weights_are_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    module = nn.Sequential(Scaled(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    module(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    split, queue = WeightGradients([module]), list[Factors]()
    with split.installed(), split.putting_off(queue):
        module(x).sum().backward()
    assert [factors.weight for factors in queue] == [module[2].weight]
    add_up(queue)
    for parameter, grad in zip(module.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, grad, atol=1e-6)


class Attending(nn.Module):
    """torch's attention between two linears."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor, other: Tensor | None = None, **options: Any) -> Tensor:
        x = self.before(x)
        key, value = (x, x) if other is None else (other, 2 * other)
        mixed, weights = self.attention(x, key, value, **options)
        return x + mixed if weights is None else x + mixed * weights.square().sum()


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({}, {}),
        ({}, {"need_weights": False, "is_causal": True, "attn_mask": torch.ones(5, 5).triu(1).bool()}),
        ({"bias": False}, {"key_padding_mask": torch.eye(3, 5).bool()}),
        ({"dropout": 0.4}, {"need_weights": False}),
        ({"dropout": 0.4}, {"average_attn_weights": False}),
        ({"kdim": 6, "vdim": 6, "add_bias_kv": True, "add_zero_attn": True}, {"other": (3, 4, 6)}),
        ({}, {"other": (3, 4, 8)}),
    ],
    ids=["weights", "causal", "padding", "dropout", "dropout-weights", "other-sizes", "other-source"],
)
def test_the_projections_of_torchs_attention_are_put_off(options: dict[str, Any], call: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module, x = Attending(**options).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    if "other" in call:
        call = {"other": torch.randn(call["other"], dtype=torch.float64, requires_grad=True)}
    torch.manual_seed(1)
    expected = module(x, **call)
    expected.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    split, queue, seen = WeightGradients([module]), list[Factors](), list[str]()
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    torch.manual_seed(1)
    with split.installed(), split.putting_off(queue):
        got = module(x, **call)
        got.square().sum().backward()
    assert torch.allclose(got, expected, atol=1e-12)
    kept_back = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert kept_back == {name for name in grads if "bias_" not in name}, "linears have nothing yet"
    add_up(queue)
    assert sorted(seen) == sorted(grads), "every hook ran once"
    for name, parameter in module.named_parameters():
        assert torch.allclose(parameter.grad, grads[name], atol=1e-12), name
    assert "forward" not in module.attention.__dict__ and "put_off" not in module.attention.__dict__


def test_weights_that_are_computed_are_computed_as_often_as_without_splitting() -> None:
    def spectral() -> nn.Sequential:
        torch.manual_seed(0)
        linears = (nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6).double()) for _ in range(2))
        return nn.Sequential(*linears, nn.MultiheadAttention(6, 2, dtype=torch.float64))

    def run(module: nn.Sequential) -> Tensor:
        x = module[1](module[0](torch.ones(2, 3, 6, dtype=torch.float64)))
        return module[2](x, x, x)[0].square().sum()

    module, queue = spectral(), list[Factors]()
    nn.utils.parametrizations.spectral_norm(module[2].out_proj)
    split = WeightGradients([module])
    with split.installed():
        loss = run(module)
        with split.putting_off(queue):
            loss.backward()
    add_up(queue)
    other = spectral()
    nn.utils.parametrizations.spectral_norm(other[2].out_proj)
    run(other).backward()
    for name, buffer in other.named_buffers():
        assert torch.equal(module.get_buffer(name), buffer), name
    for name, parameter in other.named_parameters():
        assert torch.allclose(module.get_parameter(name).grad, parameter.grad, atol=1e-12), name
