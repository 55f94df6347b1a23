"""The weight that a linear multiplies by, as a view of a parameter, and the dtype of the parameter's gradient.

Autograd accepts a gradient in a wider dtype than that of the weight only for a parameter itself, not for a tensor that
was sliced or cast from it. The product of two 16-bit factors should be added to a float32 main gradient without being
rounded first. The functions of `lightning_megatron.layers.multiply.products` therefore take whole parameters and apply
an `Operand` inside::

    forward    parameter ─rows, transposition, autocast─▶ weight [out, in], 16 bits
    backward   gradᵀ x, float32 ─rows, transposition─▶ gradient of the parameter, float32
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.mesh.parts.boxes import Range


def autocast_input(x: Tensor) -> Tensor:
    """``x`` cast to autocast's dtype where autocast is on for its device, as ``F.linear`` would cast it."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def gradient_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype in which gradients of a tensor are accumulated: float32 for 16-bit parameters with main gradients."""
    return (tensor.grad_dtype if tensor.is_leaf else None) or tensor.dtype


def widened_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Product in ``dtype``, not rounded to the factors' dtype first. left: [m, k], right: [k, n] -> [m, n]."""
    if left.dtype == dtype:
        return left @ right
    with torch.autocast(left.device.type, enabled=False):  # it would round the factors again
        if _leaves_sum_wide(left, dtype):
            return torch.mm(left, right, out_dtype=dtype)
        if torch.promote_types(left.dtype, dtype) == dtype:
            return left.to(dtype) @ right.to(dtype)
        return (left @ right).to(dtype)


def _leaves_sum_wide(factor: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch can multiply these 16-bit factors and return the float32 sum unrounded: on CUDA only."""
    sixteen = factor.dtype in (torch.bfloat16, torch.float16)
    return factor.is_cuda and torch.version.hip is None and sixteen and dtype == torch.float32


@dataclass(frozen=True)
class Operand:
    """The matrix or vector that a linear takes from a parameter: all of it, or some rows.

    Attributes:
        rows: ranges along the output features, or None for all of them.
        transposed: whether the parameter is stored as [in, out].
    """

    rows: tuple[Range, ...] | None = None
    transposed: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        """The operand, in autocast's dtype where autocast is on: [out, in], or [out] for a bias."""
        whole = parameter.t() if self.transposed else parameter
        if self.rows is not None:
            parts = [whole[start:stop] for start, stop in self.rows]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return autocast_input(whole)

    def add_to(self, whole: Tensor | None, part: Tensor, shape: torch.Size) -> Tensor:
        """Add the gradient of this operand to the gradient of its parameter.

        Args:
            whole: gradient of the parameter from its other operands, changed in place; None if there is none yet.
            part: gradient of this operand, [out, in] or [out].
            shape: shape of the parameter.

        Returns:
            The gradient of the parameter, of that shape.
        """
        if whole is None and self.rows is None:
            return part.t() if self.transposed else part
        whole = part.new_zeros(shape) if whole is None else whole
        matrix, start = (whole.t() if self.transposed else whole), 0
        for low, high in self.rows or ((0, len(matrix)),):
            matrix[low:high].add_(part[start : start + high - low])
            start += high - low
        return whole


WHOLE, TRANSPOSED = Operand(), Operand(transposed=True)
