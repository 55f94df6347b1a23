"""Gradients of 16-bit weights: products of 16-bit factors reach a float32 gradient with all digits of the sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.layers.multiply.products import (
    SIXTEEN_BIT,
    PendingProducts,
    sharded_product,
    share_input,
    whole_product,
)
from lightning_megatron.layers.multiply.weight_view import TRANSPOSED, Operand, widened_product
from lightning_megatron.pipeline.forwards.factors import Factors, add_up
from lightning_megatron.pipeline.forwards.weight_gradients import WeightGradients

Run = Callable[[Tensor, nn.Parameter, nn.Parameter], Tensor]
"""x, parameters of weight and bias -> output."""


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def whole(x: Tensor, weight: nn.Parameter, bias: nn.Parameter) -> Tensor:
    return whole_product(x, weight, bias, SIXTEEN_BIT)


def transposed(x: Tensor, weight: nn.Parameter, bias: nn.Parameter) -> Tensor:
    return whole_product(x, weight, bias, SIXTEEN_BIT, TRANSPOSED)


def packed(x: Tensor, weight: nn.Parameter, bias: nn.Parameter) -> Tensor:
    """Three parts of one parameter, as query, key and value."""
    parts = [Operand(((0, 8),)), Operand(((8, 10), (12, 14))), Operand(((10, 12), (14, 24)))]
    pending = PendingProducts(3)
    shared, *weights = share_input(x, [(weight, part) for part in parts], pending, None, None)
    outputs = [sharded_product(shared, weights[i], bias, pending, i, part=part) for i, part in enumerate(parts)]
    rows = [row for part in parts for low, high in part.rows or () for row in range(low, high)]
    return torch.cat(outputs, -1)[..., torch.tensor(rows).argsort()]


def factors(mixed: bool, turned: bool) -> tuple[Tensor, nn.Parameter, nn.Parameter, Tensor]:
    """Input, weight and bias with float32 gradients (float32 weights if ``mixed``), gradient of the output."""
    torch.manual_seed(0)
    x, grad = torch.randn(2, 30, 16).bfloat16(), torch.randn(2, 30, 24).bfloat16()
    kind = torch.float32 if mixed else torch.bfloat16
    weight, bias = nn.Parameter(torch.randn((16, 24) if turned else (24, 16)).to(kind)), nn.Parameter(torch.randn(24))
    bias.data = bias.data.to(kind)
    for parameter in (weight, bias):
        parameter.grad_dtype = torch.float32
    return x, weight, bias, grad


def distance(found: Tensor | None, wanted: Tensor) -> float:
    assert found is not None and found.dtype == torch.float32
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("mixed", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("run", [whole, transposed, packed])
def test_products_of_several_backwards_add_up_without_being_rounded(run: Run, mixed: bool) -> None:
    x, weight, bias, grad = factors(mixed, run is transposed)
    arrived: list[str] = []
    weight.register_post_accumulate_grad_hook(lambda _: arrived.append("weight"))
    for index in range(1, 4):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            out = run(x / index, weight, bias)
            assert out.dtype == torch.bfloat16
            out.backward(grad)  # under autocast too: it must not touch the product
    rows, inputs = grad.reshape(-1, 24).float(), [(x / index).reshape(-1, 16).float() for index in range(1, 4)]
    wanted = sum(rows.t() @ each for each in inputs)
    assert isinstance(wanted, Tensor) and arrived == ["weight"] * 3
    assert distance(weight.grad, wanted.t() if run is transposed else wanted) < 1e-6
    assert distance(bias.grad, 3 * rows.sum(0)) < 1e-6
    rounded = sum((rows.t() @ each).bfloat16().float() for each in inputs)
    assert isinstance(rounded, Tensor) and distance(rounded, wanted) > 1e-4


@pytest.mark.parametrize("mixed", [False, True], ids=["bf16", "autocast"])
def test_put_off_products_are_not_rounded_either(mixed: bool) -> None:
    x, weight, bias, grad = factors(mixed, False)
    linear = nn.Linear(16, 24)
    linear.weight, linear.bias = weight, bias
    split, queue = WeightGradients([linear]), list[Factors]()
    with split.installed(), split.putting_off(queue), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        for index in range(1, 3):
            linear(x / index).backward(grad)
        add_up(queue)
    rows = grad.reshape(-1, 24).float()
    wanted = sum(rows.t() @ (x / index).reshape(-1, 16).float() for index in range(1, 3))
    assert isinstance(wanted, Tensor)
    assert distance(linear.weight.grad, wanted) < 1e-6 and distance(linear.bias.grad, 2 * rows.sum(0)) < 1e-6


def test_a_gradient_of_16_bits_stays_one() -> None:
    x, weight, bias, grad = factors(False, False)
    weight.grad_dtype = bias.grad_dtype = torch.bfloat16
    whole(x, weight, bias).backward(grad)
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad, grad.reshape(-1, 24).t() @ x.reshape(-1, 16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_16_bit_factors_has_float32s_digits(dtype: torch.dtype, device: str) -> None:
    left, right = (torch.randn(shape, device=device).to(dtype) for shape in ((30, 24), (30, 16)))
    wanted = left.double().t() @ right.double()
    found = widened_product(left.t(), right, torch.float32)
    assert found.dtype == torch.float32 and distance(found, wanted) < 1e-6
    assert distance((left.t() @ right).float(), wanted) > 1e-5
