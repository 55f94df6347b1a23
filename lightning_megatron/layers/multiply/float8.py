"""The matrix products of a linear, on 8-bit factors with 16-bit or float32 results.

Every factor is divided by its scale, so that its largest element becomes the largest number of its 8-bit format. The
product is multiplied by both scales:

    forward                 x  e4m3 [n, in]    ×  W  e4m3 [in, out]   ->  y   bfloat16
    gradient of the input   g  e5m2 [n, out]   ×  W  e4m3 [out, in]   ->  dx  bfloat16
    gradient of the weight  gᵀ e5m2 [out, n]   ×  x  e4m3 [n, in]     ->  dW  float32, as main gradients are

Activations and weights use the format with more precision, gradients the format with more range, as proposed for
training by Micikevicius et al. (arXiv 2209.05433). A scale comes from the current factor, not from earlier steps, so a
product is a function of its factors alone: recomputed layers and resumed runs compute the same product.

Tensor-parallel ranks use different scales. A rank multiplies its own slices and undoes its own two scales before the
sum over the group, so the sum is correct, and a rank with small elements even keeps more of their digits. Activations
between layers, messages between ranks and activations kept for the backward are bfloat16, as without this module.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.layers.multiply.products import (
    Products,
    input_gradient,
    product,
    weight_gradient,
    whole_product,
)
from lightning_megatron.layers.multiply.weight_view import WHOLE, Operand

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Dims of a weight must be multiples of this: scaled products on GPUs read 16 bytes at a time."""


def fits(*sizes: int) -> bool:
    """Whether scaled products accept dims of these sizes."""
    return all(size > 0 and size % MULTIPLE == 0 for size in sizes)


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` divided by its scale, in the 8-bit ``dtype``, and the scale, a float32 scalar.

    Zeros stay zeros. If ``x`` has an infinity or NaN, the scale is not finite, and neither is any product with it.
    """
    largest = torch.finfo(dtype).max
    low, high = x.aminmax()
    scale = (torch.maximum(-low, high).float() / largest).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale).clamp(-largest, largest).to(dtype), scale


def scaled_product(
    left: tuple[Tensor, Tensor],
    right: tuple[Tensor, Tensor],
    bias: Tensor | None = None,
    fast: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Product of two `scaled` matrices. left: [m, k], right: [k, n], k and n multiples of 16 -> [m, n].

    Args:
        left: matrix and scale.
        right: matrix and scale.
        bias: [n], bfloat16; added to the rows.
        fast: let the GPU accumulate with less precision.
        dtype: dtype of the product, bfloat16 or float32.
    """
    (a, scale_a), (b, scale_b) = left, right
    columns = b.t().contiguous().t()  # GPUs need the left matrix row-major and the right one column-major
    with torch.autocast(a.device.type, enabled=False):  # would round inside the product where torch emulates it
        return torch._scaled_mm(
            a.contiguous(), columns, scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast
        )


def float8_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Output of a linear. x: [.., in], weight: [out, in], bias: [out] -> [.., out].

    Falls back to `product` where ``x`` is empty or not bfloat16 (outside autocast), or a dim of ``weight`` does not
    fit.
    """
    if not _takes(x, weight):
        return product(x, weight, bias)
    flat = scaled(x.reshape(-1, x.shape[-1]), FORWARD)
    matrix, scale = scaled(weight, FORWARD)
    output: Tensor = scaled_product(flat, (matrix.t(), scale), bias, fast=True).unflatten(0, x.shape[:-1])
    return output


def float8_input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient of a linear's input. grad: [.., out], weight: [out, in] -> [.., in]; falls back as `float8_product`."""
    if not _takes(grad, weight):
        return input_gradient(grad, weight)
    flat = scaled(grad.reshape(-1, grad.shape[-1]), BACKWARD)
    gradient: Tensor = scaled_product(flat, scaled(weight, FORWARD)).unflatten(0, grad.shape[:-1])
    return gradient


def float8_weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of a linear's weight, in ``dtype``. grad: [.., out], x: [.., in] -> [out, in].

    Falls back to `weight_gradient` in the same cases as `float8_product`. Tokens are padded with zeros to a multiple of
    16, which does not change the sum over tokens.
    """
    if not (_bfloat16(grad, x) and fits(grad.shape[-1], x.shape[-1])):
        return weight_gradient(grad, x, dtype)
    left, left_scale = scaled(_filled(grad), BACKWARD)
    wide = torch.float32 if dtype in (torch.float32, torch.float64) else torch.bfloat16
    return scaled_product((left.t(), left_scale), scaled(_filled(x), FORWARD), dtype=wide).to(dtype)


FLOAT8 = Products(float8_product, float8_input_gradient, float8_weight_gradient)


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, operand: Operand = WHOLE) -> Tensor:
    """``F.linear`` with 8-bit products, also in the backward. x: [.., in], operand: [out, in] -> [.., out]."""
    return whole_product(x, weight, bias, FLOAT8, operand)


def _bfloat16(*factors: Tensor) -> bool:
    return all(factor.dtype == torch.bfloat16 and factor.numel() > 0 for factor in factors)


def _takes(factor: Tensor, weight: Tensor) -> bool:
    return _bfloat16(factor, weight) and fits(*weight.shape)


def _filled(x: Tensor) -> Tensor:
    """x: [.., features] -> [tokens, features], padded with rows of zeros to a multiple of 16 tokens."""
    flat = x.reshape(-1, x.shape[-1])
    missing = -flat.shape[0] % MULTIPLE
    return torch.nn.functional.pad(flat, (0, 0, 0, missing)) if missing else flat
