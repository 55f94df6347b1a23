"""The matrix products of a sharded linear, with the weight's gradient as a separate product.

Autograd computes both gradients of a linear in one node. Sharded layers need them apart: the gradient of the input
has to be summed over the tensor group, and the product for the weight's gradient is the work that hides that sum.
Column-parallel layers that read one tensor (query, key and value; gate and up) share its gradient's all-reduce as
well:

    forward    x --SharedInput--> x' --linear--> q, k, v
    backward   dq, dk, dv --linear: only dq Wq + dk Wk + dv Wv--> dx' --SharedInput: start all-reduce(dx'),
               compute dWq, dWk, dWv, wait--> dx

`SharedInput` passes the weights through as well, so that the gradients it computes late reach them through autograd
in the ordinary way, hooks included. Until then the linear's node stands in for them with a zero-stride tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.collectives import (
    raw_all_gather,
    raw_all_reduce,
    raw_reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Output of a linear. x: [.., in], weight: [out, in], bias: [out] -> [.., out]."""
    return torch.nn.functional.linear(x, weight, bias)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient of a linear's input. grad: [.., out], weight: [out, in] -> [.., in]."""
    return grad.matmul(weight)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of a linear's weight. grad: [.., out], x: [.., in] -> [out, in]."""
    return grad.reshape(-1, grad.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1]))


@dataclass(frozen=True)
class Products:
    """How a linear multiplies: its output, and the gradients of its input and weight."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor], Tensor]


SIXTEEN_BIT = Products(product, input_gradient, weight_gradient)
"""In the dtype of the factors, which is 16-bit in mixed precision; see `lightning_megatron.layers.float8` for less."""


def of_its_own(output: Tensor) -> Tensor:
    """What a custom function may return: nobody can write into a view from it, as ``nn.ReLU(inplace=True)`` does, and
    ``F.linear`` gives views.
    """
    return output.detach() if output._is_view() else output


PutOff = Callable[[Tensor, Tensor], None]
"""Takes the factors ``(grad, x)`` of a weight's gradient that a split backward multiplies later."""


class PendingProducts:
    """Factors of the weight gradients that a shared input's backward will multiply, by position of the weight."""

    def __init__(self, weights: int) -> None:
        self._factors: list[tuple[Products, Tensor, Tensor] | None] = [None] * weights

    def put(self, index: int, products: Products, grad: Tensor, x: Tensor) -> None:
        """Keep the factors of one weight's gradient."""
        self._factors[index] = (products, grad, x)

    def take(self, index: int) -> Tensor | None:
        """The product for one weight, or None if its linear took no part in the backward."""
        factors, self._factors[index] = self._factors[index], None
        if factors is None:
            return None
        products, grad, x = factors
        return products.weight_gradient(grad, x)


class _SharedInput(torch.autograd.Function):
    """x, weights -> x', weights'; forward identity or all-gather, backward all-reduce or reduce-scatter."""

    @staticmethod
    def forward(
        ctx: Any,
        pending: PendingProducts,
        group: dist.ProcessGroup | None,
        dim: int | None,
        x: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.pending, ctx.group, ctx.dim = pending, group, dim
        ctx.set_materialize_grads(False)
        gathered = x.view_as(x) if dim is None or group is None else raw_all_gather(x, dim, group)
        return gathered, *(weight.view_as(weight) for weight in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *stand_ins: Tensor | None) -> tuple[Any, ...]:
        work = None
        if grad is not None and ctx.group is not None and ctx.needs_input_grad[3]:
            if ctx.dim is None:
                grad, work = start_all_reduce(grad, ctx.group)
            else:
                grad, work = start_reduce_scatter(grad, ctx.dim, ctx.group)
        products = [ctx.pending.take(index) for index in range(len(stand_ins))]
        if work is not None:
            work.wait()
        return None, None, None, grad, *products


class _ShardedProduct(torch.autograd.Function):
    """x', weight', bias -> x' weight'^T + bias; the weight's gradient is left to `SharedInput`."""

    @staticmethod
    def forward(
        ctx: Any,
        products: Products,
        pending: PendingProducts,
        index: int,
        put_off: PutOff | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.products, ctx.pending, ctx.index, ctx.put_off = products, pending, index, put_off
        ctx.save_for_backward(x, weight)
        return of_its_own(products.product(x, weight, bias))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        wanted, stand_in, bias = ctx.needs_input_grad, None, None
        if ctx.put_off is not None:
            ctx.put_off(grad, x)
        if wanted[5]:
            ctx.pending.put(ctx.index, ctx.products, grad, x)
            stand_in = grad.new_zeros(()).expand(weight.shape)
        if wanted[6]:
            bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        x_grad = ctx.products.input_gradient(grad, weight) if wanted[4] else None
        return None, None, None, None, x_grad, stand_in, bias


class _RowProduct(torch.autograd.Function):
    """x, weight -> sum over the group of x weight^T, whole (all-reduce) or this rank's block (reduce-scatter)."""

    @staticmethod
    def forward(
        ctx: Any,
        products: Products,
        group: dist.ProcessGroup,
        dim: int | None,
        put_off: PutOff | None,
        x: Tensor,
        weight: Tensor,
    ) -> Tensor:
        ctx.products, ctx.group, ctx.dim, ctx.put_off = products, group, dim, put_off
        ctx.save_for_backward(x, weight)
        partial = of_its_own(products.product(x, weight, None))
        if dim is not None:
            return raw_reduce_scatter(partial, dim, group)
        return raw_all_reduce(partial, group, keep=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        if ctx.dim is not None:
            grad = raw_all_gather(grad, ctx.dim, ctx.group)
        if ctx.put_off is not None:
            ctx.put_off(grad, x)
        return (
            None,
            None,
            None,
            None,
            ctx.products.input_gradient(grad, weight) if ctx.needs_input_grad[4] else None,
            ctx.products.weight_gradient(grad, x) if ctx.needs_input_grad[5] else None,
        )


def share_input(
    x: Tensor, weights: Sequence[Tensor], pending: PendingProducts, group: dist.ProcessGroup | None, dim: int | None
) -> tuple[Tensor, ...]:
    """Bring ``x`` to column-sharded weights.

    Args:
        x: [.., in], replicated; with ``dim``, split along it over the group.
        weights: local weights [out / group, in] that read ``x``.
        pending: where the products of their gradients wait.
        group: the tensor group, or None where the gradient is summed further up.
        dim: the dim along which ``x`` is split (sequence parallelism), or None.

    Returns:
        ``x`` whole on every rank, then the weights, in order.
    """
    return cast("tuple[Tensor, ...]", _SharedInput.apply(pending, group, dim, x, *weights))


def sharded_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pending: PendingProducts,
    index: int,
    put_off: PutOff | None = None,
    products: Products = SIXTEEN_BIT,
) -> Tensor:
    """``x`` times a weight, both from `share_input`. x: [.., in], weight: [out / group, in] -> [.., out / group].

    With ``put_off``, weight and bias come detached, and the factors of their gradients go there.
    """
    return cast(Tensor, _ShardedProduct.apply(products, pending, index, put_off, x, weight, bias))


def row_product(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup,
    dim: int | None,
    put_off: PutOff | None = None,
    products: Products = SIXTEEN_BIT,
) -> Tensor:
    """Sum of the ranks' products. x: [.., in / group], weight: [out, in / group] -> [.., out], split along ``dim``.

    With ``put_off``, the weight comes detached, and the factors of its gradient go there.
    """
    return cast(Tensor, _RowProduct.apply(products, group, dim, put_off, x, weight))


def autocast_input(x: Tensor) -> Tensor:
    """The tensor in autocast's dtype where autocast is on for its device, as ``F.linear`` would take it."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))
