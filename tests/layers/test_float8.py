"""Products of 8-bit numbers against those of float32, by the bounds that the formats' digits give."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers.linear import RowParallelLinear
from lightning_megatron.layers.multiply.float8 import BACKWARD, FLOAT8, FORWARD, fits, float8_linear, scaled
from lightning_megatron.pipeline.cut.trunk import LayersHere
from lightning_megatron.pipeline.forwards.factors import add_up
from lightning_megatron.pipeline.forwards.low_precision_linears import check_float8, multiply_in_8_bits
from lightning_megatron.pipeline.forwards.weight_gradients import WeightGradients
from lightning_megatron.strategy.lightning.precision import MegatronMixedPrecision

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# Half a unit in the last place: 2^-4 of a number in e4m3, 2^-3 in e5m2. Rounding errors of the terms of a sum have
# either sign, so that of a product, relative to it as a whole, stays below that of its two factors together.
BOUND = {"output": 2**-4, "gradient": 2**-3}


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().float() - wanted.detach()).norm() / wanted.detach().norm())


def _factors(tokens: tuple[int, ...] = (3, 7)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x, weight, bias, grad = (
        torch.randn(shape, generator=random) for shape in ((*tokens, 32), (48, 32), (48,), (*tokens, 48))
    )
    return tuple(t.bfloat16() for t in (x, weight / 6, bias, grad * 1e-6))  # type: ignore[return-value]


def _gradients(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, eight: bool) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    out = (float8_linear if eight else nn.functional.linear)(*leaves)
    return out, *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [(16,), (3, 7), (2, 1, 5)])
def test_a_linear_and_its_gradients_are_those_of_float32_but_for_the_digits(
    tokens: tuple[int, ...], device: str
) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of 8 bits")
    factors = tuple(t.to(device) for t in _factors(tokens))
    found = _gradients(*factors, eight=True)
    wanted = _gradients(*(t.float() for t in factors), eight=False)
    for name, mine, theirs in zip(("output", "input", "weight", "bias"), found, wanted, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == theirs.shape
        bound = 2**-7 if name == "bias" else BOUND["output" if name == "output" else "gradient"]
        assert _distance(mine, theirs) < bound
        if name != "bias":
            assert _distance(mine, theirs) > 2**-9  # closer than that only 16 bits come


def test_a_product_is_exact_where_eight_bits_hold_the_factors() -> None:
    x = torch.randint(-4, 5, (5, 16), generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 0] = 7.0
    weight = 0.5 * torch.eye(16).bfloat16()
    assert torch.equal(FLOAT8.product(x, weight, None), 0.5 * x)
    assert torch.equal(FLOAT8.input_gradient(x.sign(), weight), 0.5 * x.sign())
    assert torch.equal(FLOAT8.weight_gradient(x.sign(), x.sign(), torch.bfloat16), x.sign().t() @ x.sign())


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
def test_scaling_uses_the_whole_range_and_keeps_zeros(dtype: torch.dtype) -> None:
    for size in (1e-30, 1.0, 1e30):
        x = torch.tensor([[size, -size / 4, 0.0]], dtype=torch.bfloat16)
        low, scale = scaled(x, dtype)
        assert float(low.float().max()) == torch.finfo(dtype).max and scale.dtype == torch.float32
        assert torch.allclose(low.float() * scale, x.float(), rtol=2**-7, atol=0)
    low, scale = scaled(torch.zeros(2, 3, dtype=torch.bfloat16), dtype)
    assert not low.float().any() and scale > 0


def test_zeros_give_zeros_and_what_is_not_finite_does_not_get_lost() -> None:
    x, weight, bias, grad = _factors()
    found = _gradients(torch.zeros_like(x), weight, torch.zeros_like(bias), torch.zeros_like(grad), eight=True)
    assert all(not t.any() for t in found)
    for bad in (float("inf"), float("-inf"), float("nan")):
        worse = x.clone()
        worse[1, 2, 3] = bad
        assert not FLOAT8.product(worse, weight, bias)[1, 2].isfinite().any()
        assert not FLOAT8.weight_gradient(grad, worse, torch.float32)[:, 3].isfinite().any()


@pytest.mark.parametrize(("features", "dtype"), [((48, 30), torch.bfloat16), ((48, 32), torch.float32)])
def test_what_does_not_fit_is_multiplied_as_without(features: tuple[int, int], dtype: torch.dtype) -> None:
    assert fits(48, 32) and not fits(48, 30) and not fits(0, 32)
    x, weight = torch.randn(5, features[1], dtype=dtype), torch.randn(features, dtype=dtype)
    grad = torch.randn(5, features[0], dtype=dtype)
    found, wanted = (_gradients(x, weight, grad[0], grad, eight=eight) for eight in (True, False))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    assert FLOAT8.product(torch.empty(0, 32, dtype=dtype), torch.ones(48, 32, dtype=dtype), None).shape == (0, 48)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.odd = nn.Linear(32, 48), RowParallelLinear(48, 32), nn.Linear(32, 12)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(self.up(x).relu()) + self.odd(x).mean()


def _network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Module()
    net.layers, net.head = nn.ModuleList([_Layer(), _Layer()]), nn.Linear(32, 16)
    return net.bfloat16()


def test_linears_of_the_trunk_are_chosen_and_given_back() -> None:
    net = _network()
    said = multiply_in_8_bits(LayersHere(net), True)
    assert said.startswith("fp8-mixed: 4 linears on this rank") and "`layers.0.odd`" in said
    chosen = {name for name, child in net.named_modules() if "forward" in child.__dict__}
    assert chosen == {f"layers.{i}.{name}" for i in range(2) for name in ("up", "down")}
    x = torch.randn(2, 16, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = net.layers[0](x)
    multiply_in_8_bits(LayersHere(net), False)
    assert not any("forward" in child.__dict__ for child in net.modules())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert 2**-9 < _distance(low.detach(), net.layers[0](x).detach().float()) < 2**-4


def test_a_module_without_a_linear_that_fits_is_refused() -> None:
    net = nn.Module()
    net.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    with pytest.raises(ValueError, match=r"multiples of 16; there are `layers.0` \[6, 6\], `layers.1` \[6, 6\]"):
        multiply_in_8_bits(LayersHere(net), True)


def _trained(split: bool) -> dict[str, Tensor | None]:
    """Gradients of a chain of linears after one backward."""
    torch.manual_seed(0)
    net = nn.Module()
    net.layers = nn.ModuleList([nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 16)]).bfloat16()
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(4)).requires_grad_()
    multiply_in_8_bits(LayersHere(net), True)
    weights, queue = WeightGradients(net.layers), []  # type: ignore[var-annotated]
    with torch.autocast("cpu", dtype=torch.bfloat16), weights.installed() if split else nullcontext():
        loss = net.layers[2](net.layers[1](net.layers[0](x).relu()).relu()).float().square().sum()
        with weights.putting_off(queue) if split else nullcontext():
            loss.backward()
    assert "forward" in net.layers[0].__dict__ and len(queue) == (3 if split else 0)
    add_up(queue)
    return {name: p.grad for name, p in net.named_parameters()} | {"x": x.grad}


def test_a_split_backward_multiplies_the_same_numbers_later() -> None:
    later, at_once = _trained(True), _trained(False)
    assert later.keys() == at_once.keys() and later["layers.0.weight"] is not None
    for name, gradient in at_once.items():
        torch.testing.assert_close(later[name], gradient, rtol=0, atol=0)


def test_devices_without_such_products_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"capability 8.9 or more .* runs on `cpu`; use `precision='bf16-mixed'`"):
        check_float8(torch.device("cpu"), False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"runs on A100 of capability 8.0"):
        check_float8(torch.device("cuda", 0), False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_float8(torch.device("cuda", 0), False)
    with pytest.raises(ValueError, match="use `compile_layers=False`"):
        check_float8(torch.device("cuda", 0), True)


def test_the_plugin_takes_the_name_and_no_loss_scale() -> None:
    plugin = MegatronMixedPrecision("fp8-mixed", "cuda")
    assert plugin.layer_dtype == torch.bfloat16 and plugin.loss_scale is None
    with pytest.raises(ValueError, match="'fp8-mixed'"):
        MegatronMixedPrecision("fp8", "cuda")


def test_the_plugin_is_passed_to_the_strategy_or_the_trainer() -> None:
    plugin = MegatronMixedPrecision("fp8-mixed", "cpu")
    trainer = Trainer(accelerator="cpu", devices=1, strategy=MegatronStrategy(precision_plugin=plugin), logger=False)
    assert trainer.precision_plugin is plugin and trainer.precision == "fp8-mixed"
    assert Trainer(accelerator="cpu", devices=1, strategy="megatron", plugins=[plugin]).precision_plugin is plugin
