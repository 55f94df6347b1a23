"""The matrix products of a split linear, with the weight gradient as a separate product.

Autograd computes both gradients of a linear in one node. Split layers compute them separately: the gradient of the
input is all-reduced over the tensor group, and the all-reduce overlaps with the product for the weight gradient.
Column-parallel layers that read the same tensor (query, key and value; gate and up) share the all-reduce of its
gradient:

    forward    x --SharedInput--> x' --linear--> q, k, v
    backward   dq, dk, dv --linear: only dq Wq + dk Wk + dv Wv--> dx' --SharedInput: start all-reduce(dx'),
               compute dWq, dWk, dWv, wait--> dx

`SharedInput` also passes the weights through, so that autograd delivers the weight gradients that it computes late, and
calls their hooks. Until then the node of the linear returns a zero-stride tensor in place of each weight gradient.

Gradients of parameters have the dtype in which they are accumulated, which may be wider than that of the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.layers.multiply.weight_view import (
    WHOLE,
    Operand,
    autocast_input,
    gradient_dtype,
    widened_product,
)
from lightning_megatron.mesh.autograd import differentiating_twice, first_order
from lightning_megatron.mesh.messages.collectives import (
    copy_to_group,
    gather_for_shards,
    of_its_own,
    raw_all_gather,
    raw_all_reduce,
    raw_reduce_scatter,
    reduce_from_group,
    scatter_partial,
    start_all_reduce,
    start_reduce_scatter,
    wait_for,
)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Output of a linear. x: [.., in], weight: [out, in], bias: [out] -> [.., out]."""
    return torch.nn.functional.linear(x, weight, bias)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient of a linear's input. grad: [.., out], weight: [out, in] -> [.., in]."""
    return grad.matmul(weight)


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of a linear's weight, in ``dtype``. grad: [.., out], x: [.., in] -> [out, in]."""
    return widened_product(grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1]), dtype)


def bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of a linear's bias, in ``dtype``. grad: [.., out] -> [out]."""
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=dtype)


class _AddedBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = gradient_dtype(bias)
        return x + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, bias_gradient(grad, ctx.dtype)


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """``x + bias``; the gradient of the bias has its accumulation dtype. x: [.., out], bias: [out] -> [.., out]."""
    if bias is None:
        return x
    if gradient_dtype(bias) == x.dtype or not bias.requires_grad:
        return x + autocast_input(bias)
    return cast(Tensor, _AddedBias.apply(x, bias))


@dataclass(frozen=True)
class Products:
    """The three products of a linear: its output, the gradient of its input, and the gradient of its weight.

    Attributes:
        product: x [.., in], weight [out, in], bias [out] or None -> [.., out].
        input_gradient: gradient [.., out], weight [out, in] -> [.., in].
        weight_gradient: gradient [.., out], x [.., in], dtype -> [out, in] in that dtype.
    """

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, torch.dtype], Tensor]


SIXTEEN_BIT = Products(product, input_gradient, weight_gradient)
"""Products of the unchanged factors, 16-bit in mixed precision; those of 8 bits are in
`lightning_megatron.layers.multiply.float8`.
"""


PutOff = Callable[[Tensor, Tensor], None]
"""Takes the factors ``(grad, x)`` of a weight gradient; a split backward multiplies them later."""


class PendingProducts:
    """Factors of weight gradients that the backward of the shared input will multiply, by position of the weight."""

    def __init__(self, weights: int) -> None:
        self._factors: list[tuple[Products, Tensor, Tensor] | None] = [None] * weights

    def put(self, index: int, products: Products, grad: Tensor, x: Tensor) -> None:
        """Keep the factors of the gradient of weight ``index``: grad [.., out], x [.., in]."""
        self._factors[index] = (products, grad, x)

    def take(self, index: int, dtype: torch.dtype) -> Tensor | None:
        """Gradient [out, in] of weight ``index`` in ``dtype``, or None if its linear took no part in the backward.

        Frees the factors.
        """
        factors, self._factors[index] = self._factors[index], None
        if factors is None:
            return None
        products, grad, x = factors
        return products.weight_gradient(grad, x, dtype)


class _SharedInput(torch.autograd.Function):
    """x, parameters -> x', weights; forward identity or all-gather, backward all-reduce or reduce-scatter.

    ``uses`` gives, for every weight, the index of its parameter and the operand that it is of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        pending: PendingProducts,
        group: dist.ProcessGroup | None,
        dim: int | None,
        uses: Sequence[tuple[int, Operand]],
        x: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.pending, ctx.group, ctx.dim, ctx.uses = pending, group, dim, uses
        ctx.forms = [(parameter.shape, gradient_dtype(parameter)) for parameter in parameters]
        ctx.set_materialize_grads(False)
        gathered = x.view_as(x) if dim is None or group is None else raw_all_gather(x, dim, group)
        weights = [operand.of(parameters[index]) for index, operand in uses]
        return gathered, *(weight.view_as(weight) for weight in weights)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor | None, *stand_ins: Tensor | None) -> tuple[Any, ...]:
        work = None
        if grad is not None and ctx.group is not None and ctx.needs_input_grad[4]:
            if ctx.dim is None:
                grad, work = start_all_reduce(grad, ctx.group)
            else:
                grad, work = start_reduce_scatter(grad, ctx.dim, ctx.group)
        found: list[Tensor | None] = [None] * len(ctx.forms)
        for position, (index, operand) in enumerate(ctx.uses):
            shape, dtype = ctx.forms[index]
            part = ctx.pending.take(position, dtype)
            if part is not None:
                found[index] = operand.add_to(found[index], part, shape)
        wait_for(work, "all_reduce" if ctx.dim is None else "reduce_scatter", grad, ctx.group)
        return None, None, None, None, grad, *found


class _ShardedProduct(torch.autograd.Function):
    """x', weight, parameter of the bias -> x' weight^T + bias; `SharedInput` computes the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        products: Products,
        pending: PendingProducts,
        index: int,
        put_off: PutOff | None,
        part: Operand,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.products, ctx.pending, ctx.index, ctx.put_off, ctx.part = products, pending, index, put_off, part
        ctx.bias_form = None if bias is None else (bias.shape, gradient_dtype(bias))
        ctx.save_for_backward(x, weight)
        return of_its_own(products.product(x, weight, None if bias is None else part.of(bias)))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted, stand_in, bias = ctx.needs_input_grad, None, None
        if ctx.put_off is not None:
            ctx.put_off(grad, x)
        if wanted[6]:
            ctx.pending.put(ctx.index, ctx.products, grad, x)
            stand_in = grad.new_zeros(()).expand(weight.shape)
        if wanted[7]:
            shape, dtype = ctx.bias_form
            bias = ctx.part.add_to(None, bias_gradient(grad, dtype), shape)
        x_grad = ctx.products.input_gradient(grad, weight) if wanted[5] else None
        return None, None, None, None, None, x_grad, stand_in, bias


class _WholeProduct(torch.autograd.Function):
    """x, parameters of weight and bias -> x weight^T + bias."""

    @staticmethod
    def forward(
        ctx: Any, products: Products, operand: Operand, x: Tensor, parameter: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.products, ctx.operand, weight = products, operand, operand.of(parameter)
        ctx.shape, ctx.dtype = parameter.shape, gradient_dtype(parameter)
        ctx.bias_dtype = None if bias is None else gradient_dtype(bias)
        ctx.save_for_backward(x, weight)
        return of_its_own(products.product(x, weight, None if bias is None else autocast_input(bias)))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted, found = ctx.needs_input_grad, None
        if wanted[3]:
            found = ctx.operand.add_to(None, ctx.products.weight_gradient(grad, x, ctx.dtype), ctx.shape)
        return (
            None,
            None,
            ctx.products.input_gradient(grad, weight) if wanted[2] else None,
            found,
            bias_gradient(grad, ctx.bias_dtype) if wanted[4] else None,
        )


class _RowProduct(torch.autograd.Function):
    """x, parameter -> sum over the group of x weight^T, whole (all-reduce) or this rank's block (reduce-scatter)."""

    @staticmethod
    def forward(
        ctx: Any,
        products: Products,
        group: dist.ProcessGroup,
        dim: int | None,
        put_off: PutOff | None,
        operand: Operand,
        x: Tensor,
        parameter: Tensor,
    ) -> Tensor:
        ctx.products, ctx.group, ctx.dim, ctx.put_off, ctx.operand = products, group, dim, put_off, operand
        ctx.shape, ctx.dtype, weight = parameter.shape, gradient_dtype(parameter), operand.of(parameter)
        ctx.save_for_backward(x, weight)
        partial = of_its_own(products.product(x, weight, None))
        if dim is not None:
            return raw_reduce_scatter(partial, dim, group)
        return raw_all_reduce(partial, group, keep=False)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.dim is not None:
            grad = raw_all_gather(grad, ctx.dim, ctx.group)
        if ctx.put_off is not None:
            ctx.put_off(grad, x)
        found = None
        if ctx.needs_input_grad[6]:
            found = ctx.operand.add_to(None, ctx.products.weight_gradient(grad, x, ctx.dtype), ctx.shape)
        x_grad = ctx.products.input_gradient(grad, weight) if ctx.needs_input_grad[5] else None
        return None, None, None, None, None, x_grad, found


def share_input(
    x: Tensor,
    weights: Sequence[tuple[Tensor, Operand]],
    pending: PendingProducts,
    group: dist.ProcessGroup | None,
    dim: int | None,
) -> tuple[Tensor, ...]:
    """Prepare ``x`` for the column-parallel weights that read it.

    With ``dim``, the forward is an all-gather over the group. The backward is an all-reduce, or with ``dim`` a
    reduce-scatter, of the gradient of ``x``.

    Args:
        x: [.., in], replicated; with ``dim``, split along it over the group.
        weights: parameters, each with the operand that is its local weight [out / group, in].
        pending: keeps the factors of the weight gradients until the backward of ``x``.
        group: the tensor group, or None where an earlier layer sums the gradient of ``x``.
        dim: the dim along which ``x`` is split (sequence parallelism), or None.

    Returns:
        The whole ``x``, then the local weights, in order.
    """
    if differentiating_twice:
        gathered = x
        if group is not None:
            gathered = copy_to_group(x, group) if dim is None else gather_for_shards(x, dim, group)
        return gathered, *(operand.of(parameter) for parameter, operand in weights)
    parameters = {id(parameter): parameter for parameter, _ in weights}
    places = {key: index for index, key in enumerate(parameters)}
    uses = [(places[id(parameter)], operand) for parameter, operand in weights]
    return cast("tuple[Tensor, ...]", _SharedInput.apply(pending, group, dim, uses, x, *parameters.values()))


def sharded_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pending: PendingProducts,
    index: int,
    put_off: PutOff | None = None,
    products: Products = SIXTEEN_BIT,
    part: Operand = WHOLE,
) -> Tensor:
    """``x`` times a weight, both from `share_input`. x: [.., in], weight: [out / group, in] -> [.., out / group].

    ``bias`` is the parameter, and ``part`` selects the elements that are added. With ``put_off``, weight and bias are
    detached, and the backward passes the factors of their gradients to ``put_off``.
    """
    if differentiating_twice and products is SIXTEEN_BIT and put_off is None:
        return product(x, weight, None if bias is None else part.of(bias))
    return cast(Tensor, _ShardedProduct.apply(products, pending, index, put_off, part, x, weight, bias))


def row_product(
    x: Tensor,
    parameter: Tensor,
    group: dist.ProcessGroup,
    dim: int | None,
    put_off: PutOff | None = None,
    products: Products = SIXTEEN_BIT,
    operand: Operand = WHOLE,
) -> Tensor:
    """Sum over the group of the ranks' products. x: [.., in / group], operand: [out, in / group] -> [.., out].

    The forward is an all-reduce; with ``dim`` it is a reduce-scatter, and the output is split along ``dim``. With
    ``put_off``, the parameter is detached, and the backward passes the factors of its gradient to ``put_off``.
    """
    if differentiating_twice and products is SIXTEEN_BIT and put_off is None:
        partial = product(x, operand.of(parameter), None)
        return reduce_from_group(partial, group) if dim is None else scatter_partial(partial, dim, group)
    return cast(Tensor, _RowProduct.apply(products, group, dim, put_off, operand, x, parameter))


def whole_product(
    x: Tensor, parameter: Tensor, bias: Tensor | None, products: Products, operand: Operand = WHOLE
) -> Tensor:
    """Output of a linear that is not split. x: [.., in], operand: [out, in] -> [.., out]; no communication."""
    return cast(Tensor, _WholeProduct.apply(products, operand, x, parameter, bias))
