"""The factors of a deferred weight gradient, and how they are multiplied and added up.

The backward of a linear that is split (:mod:`.weight_gradients`) queues them; the schedule's ``W`` adds up the queue.
The weight gradient is computed in the dtype of the gradient it is added to, even if its factors have 16 bits.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron.layers.multiply.products import SIXTEEN_BIT, Products, bias_gradient
from lightning_megatron.layers.multiply.weight_view import gradient_dtype


class Factors(NamedTuple):
    """A deferred weight gradient: ``weight.grad += gradᵀ x`` (or ``xᵀ grad``), ``bias.grad += Σ grad``.

    Attributes:
        weight: [out, in], or [in, out] if ``transposed``.
        bias: [out], or ``None`` if it gets no gradient here.
        grad: gradient of the output, [.., out].
        x: input, [.., in].
        transposed: whether the weight is stored as [in, out].
        weight_rows: half-open range of the rows of a packed weight that get this gradient; ``None`` for all.
        bias_rows: the same of a packed bias.
        products: 16-bit or 8-bit matrix products.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    grad: Tensor
    x: Tensor
    transposed: bool
    weight_rows: tuple[int, int] | None = None
    bias_rows: tuple[int, int] | None = None
    products: Products = SIXTEEN_BIT

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that get a gradient from it."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def add(self) -> None:
        """Compute the products and accumulate them into ``weight.grad`` and ``bias.grad``."""
        grad = self.grad.reshape(-1, self.grad.shape[-1])
        x = self.x.reshape(-1, self.x.shape[-1])
        weight, bias = _part(self.weight, self.weight_rows), _part(self.bias, self.bias_rows)
        if weight is None:
            self.weight.grad = self._product(grad, x, gradient_dtype(self.weight))
        elif weight.dtype == x.dtype and self.products is SIXTEEN_BIT:
            weight.addmm_(*((x.t(), grad) if self.transposed else (grad.t(), x)))
        else:
            weight.add_(self._product(grad, x, weight.dtype))
        if bias is not None:
            bias.add_(bias_gradient(grad, bias.dtype))
        elif self.bias is not None:
            self.bias.grad = bias_gradient(grad, gradient_dtype(self.bias))

    def _product(self, grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        if self.products is SIXTEEN_BIT and self.transposed:
            return self.products.weight_gradient(x, grad, dtype)
        found = self.products.weight_gradient(grad, x, dtype)
        return found.t() if self.transposed else found


def _part(parameter: nn.Parameter | None, rows: tuple[int, int] | None) -> Tensor | None:
    """The existing gradient to add to, or ``None``; for rows of a packed parameter a missing one starts as zeros."""
    if parameter is None or (parameter.grad is None and rows is None):
        return None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    return parameter.grad if rows is None else parameter.grad[slice(*rows)]


def add_up(queue: list[Factors]) -> None:
    """Compute the deferred weight gradients of a queue, oldest first.

    A parameter's post-accumulate hooks run after its last product, as autograd would run them. Each pair of factors
    leaves the queue before it is multiplied, so its memory is freed afterwards.
    """
    awaited = Counter(id(parameter) for factors in queue for parameter in factors.parameters)
    queue.reverse()
    with torch.no_grad():
        while queue:
            factors = queue.pop()
            factors.add()
            for parameter in factors.parameters:
                awaited[id(parameter)] -= 1
                if not awaited[id(parameter)]:
                    _tell_hooks(parameter)


def _tell_hooks(parameter: nn.Parameter) -> None:
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)
