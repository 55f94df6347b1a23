"""The matrix products of a linear, of 8-bit numbers with 16-bit results.

Every factor is divided by one number, so that its largest element becomes the largest that its 8-bit format holds, and
the product is multiplied by both numbers again:

    forward                 x  e4m3 [n, in]    ×  W  e4m3 [in, out]   ->  y   bfloat16
    gradient of the input   g  e5m2 [n, out]   ×  W  e4m3 [out, in]   ->  dx  bfloat16
    gradient of the weight  gᵀ e5m2 [out, n]   ×  x  e4m3 [n, in]     ->  dW  float32, as main gradients are

Activations and weights take the format with more precision, gradients the one with more range, as proposed for
training by Micikevicius et al. (arXiv 2209.05433). The numbers are taken from the factor at hand, not from earlier
steps, so a product is a function of its factors alone: recomputed layers and resumed runs find the same one.

Tensor-parallel ranks do not agree on them. A rank multiplies its own parts and undoes its own two numbers before
anything is summed over the group, so parts scaled apart are no less right, and a rank with small elements even keeps
more of their digits. Between layers, and between ranks, everything is bfloat16 as without this module. So is what
backward keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.layers.products import Products, input_gradient, product, weight_gradient, whole_product
from lightning_megatron.layers.weight_view import WHOLE, Operand

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""What the dims of a weight must be multiples of: scaled products of GPUs read 16 bytes at a time."""


def fits(*sizes: int) -> bool:
    """Whether scaled products take dims of these sizes."""
    return all(size > 0 and size % MULTIPLE == 0 for size in sizes)


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` in 8 bits, and the float32 number to multiply it by to get ``x`` back.

    Zeros stay zeros. With an infinity or NaN in ``x``, the number is none either, and nor is any product with it.
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
        fast: let the GPU add up with fewer digits.
        dtype: of the product, bfloat16 or float32.
    """
    (a, scale_a), (b, scale_b) = left, right
    columns = b.t().contiguous().t()  # GPUs take the left matrix by rows and the right one by columns
    with torch.autocast(a.device.type, enabled=False):  # it would round inside the product where that is emulated
        return torch._scaled_mm(
            a.contiguous(), columns, scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast
        )


def float8_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Output of a linear. x: [.., in], weight: [out, in], bias: [out] -> [.., out].

    In 16 bits where ``x`` has no element or is not bfloat16 (outside autocast), or a dim of ``weight`` does not fit.
    """
    if not _takes(x, weight):
        return product(x, weight, bias)
    flat = scaled(x.reshape(-1, x.shape[-1]), FORWARD)
    matrix, scale = scaled(weight, FORWARD)
    return scaled_product(flat, (matrix.t(), scale), bias, fast=True).unflatten(0, x.shape[:-1])


def float8_input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient of a linear's input. grad: [.., out], weight: [out, in] -> [.., in]; as `float8_product` falls back."""
    if not _takes(grad, weight):
        return input_gradient(grad, weight)
    flat = scaled(grad.reshape(-1, grad.shape[-1]), BACKWARD)
    return scaled_product(flat, scaled(weight, FORWARD)).unflatten(0, grad.shape[:-1])


def float8_weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of a linear's weight, in ``dtype``. grad: [.., out], x: [.., in] -> [out, in]; as `float8_product` falls
    back.

    The sum over tokens is filled up with zeros to a multiple of 16, which adds nothing.
    """
    if not (_bfloat16(grad, x) and fits(grad.shape[-1], x.shape[-1])):
        return weight_gradient(grad, x, dtype)
    left, left_scale = scaled(_filled(grad), BACKWARD)
    wide = torch.float32 if dtype in (torch.float32, torch.float64) else torch.bfloat16
    return scaled_product((left.t(), left_scale), scaled(_filled(x), FORWARD), dtype=wide).to(dtype)


FLOAT8 = Products(float8_product, float8_input_gradient, float8_weight_gradient)


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, operand: Operand = WHOLE) -> Tensor:
    """``F.linear`` by products of 8-bit numbers, gradients included. x: [.., in], operand: [out, in] -> [.., out]."""
    return whole_product(x, weight, bias, FLOAT8, operand)


def _bfloat16(*factors: Tensor) -> bool:
    return all(factor.dtype == torch.bfloat16 and factor.numel() > 0 for factor in factors)


def _takes(factor: Tensor, weight: Tensor) -> bool:
    return _bfloat16(factor, weight) and fits(*weight.shape)


def _filled(x: Tensor) -> Tensor:
    """x: [.., features] -> [tokens, features], tokens filled up with rows of zeros to a multiple of 16."""
    flat = x.reshape(-1, x.shape[-1])
    missing = -flat.shape[0] % MULTIPLE
    return torch.nn.functional.pad(flat, (0, 0, 0, missing)) if missing else flat
