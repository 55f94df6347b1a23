"""Splits a backward in two: the weight gradients of linears are deferred until the schedule runs ``W``.

The backward of a linear has two products, and the previous stage waits only for the input gradient. In micro-batches
whose backward the schedule splits, linears run through an autograd function that queues the factors of the weight
gradient instead of multiplying them::

    I   g ──▶ g W ──▶ previous layer           W   (g, x) ──▶ weight.grad += gᵀ x,  bias.grad += Σ g
        └───▶ (g, x) put into the queue

The weight gradient is computed in the dtype of the gradient it is added to, even if its factors have 16 bits.

Autograd runs once per micro-batch, in ``I``, and so do custom functions and recomputation. Parameters of modules other
than linears get their gradients in ``I``. The method is that of zero bubble pipelining (arXiv 2401.10241); one backward
suffices, as both factors are known in ``I``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_megatron.layers.attend import attend_heads
from lightning_megatron.layers.attention import ParallelMultiheadAttention
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.multiply.float8 import FLOAT8
from lightning_megatron.layers.multiply.products import SIXTEEN_BIT, Products
from lightning_megatron.layers.multiply.weight_view import autocast_input
from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.messages.collectives import of_its_own
from lightning_megatron.mesh.parts.packages import module_of
from lightning_megatron.pipeline.elsewhere.abstract import is_ordinary
from lightning_megatron.pipeline.forwards.factors import Factors
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack, Wrapper


class WeightGradients:
    """The linears of one stage whose weight gradients can be deferred.

    Args:
        layers: the modules to search for linears.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        modules = [module for layer in layers for module in layer.modules()]
        self._calls: list[_LinearCall | _ShardedCall | _AttentionCall] = [
            _LinearCall(self, m) for m in modules if is_plain_linear(m) and _holds(m, "weight")
        ]
        self._calls += [_ShardedCall(self, m) for m in modules if is_sharded_linear(m) and _holds(m, "weight")]
        self._calls += [_AttentionCall(self, m) for m in modules if _is_packed_attention(m)]
        self._queue: list[Factors] | None = None
        self._splits = False
        self._anchors: dict[torch.device, Tensor] = {}

    @property
    def parameters(self) -> frozenset[int]:
        """Ids of the parameters whose gradients may be deferred."""
        return frozenset(
            id(parameter) for call in self._calls for parameter in call.parameters if parameter is not None
        )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run the linears through the splitting function inside the context."""
        self.switch(True)
        try:
            yield
        finally:
            self.switch(False)

    def switch(self, splits: bool) -> None:
        """Install or remove the splitting function on all linears.

        Args:
            splits: whether backwards of forwards that run from now on are split.
        """
        if splits == self._splits:
            return
        self._splits = splits
        for call in self._calls:
            if splits:
                call.install()
            else:
                call.remove()

    @contextmanager
    def putting_off(self, queue: list[Factors]) -> Iterator[None]:
        """Append the factors of a backward that runs in the context to ``queue``."""
        self._queue = queue
        try:
            yield
        finally:
            self._queue = None

    def put(self, factors: Factors) -> None:
        """Append the factors of a deferred weight gradient to the queue.

        Raises:
            RuntimeError: no backward of the schedule is running.
        """
        if self._queue is None:
            raise RuntimeError(
                "the step runs a backward of its own (`torch.autograd.grad` or `.backward()`), which a schedule that "
                "splits backwards cannot follow; use `pipeline_schedule='1f1b'` or 'interleaved'."
            )
        self._queue.append(factors)

    def anchor(self, device: torch.device) -> Tensor:
        """A float32 scalar on ``device`` that requires grad but never gets one, so that autograd runs the backward."""
        if device not in self._anchors:
            with torch.inference_mode(False):
                self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self._anchors[device]


def puts_off(module: nn.Module) -> bool:
    """Whether a part of ``module`` puts off gradients of weights now, and so saves other tensors than usual."""
    parts = module.modules()
    return any("put_off" in vars(part) or ForwardStack.of(part).get(ForwardSlot.SPLIT) is not None for part in parts)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module computes just ``x Wᵀ + b`` (``nn.Linear``) or ``x W + b`` (Hugging Face's ``Conv1D``)."""
    if isinstance(module, nn.Linear):
        whole = getattr(module, "_sharding", None) is None
        return type(module).forward is nn.Linear.forward or (hasattr(module, "local_weight") and whole)
    return type(module).__name__ == "Conv1D" and module_of(type(module)) == "transformers.pytorch_utils"


def is_sharded_linear(module: nn.Module) -> bool:
    """Whether a module is a linear split over the tensor group that can defer its weight gradient."""
    return isinstance(module, nn.Linear) and hasattr(module, "put_off") and not is_plain_linear(module)


def _is_packed_attention(module: nn.Module) -> bool:
    """Whether a module is ``nn.MultiheadAttention``, which computes its projections without calling linears."""
    forwards = (nn.MultiheadAttention.forward, ParallelMultiheadAttention.forward)
    if not isinstance(module, nn.MultiheadAttention) or type(module).forward not in forwards:
        return False
    return _holds(module, "in_proj_weight") and _holds(module.out_proj, "weight")


def _holds(module: nn.Module, name: str) -> bool:
    """Whether a parameter is the module's own, rather than computed at each reading: a spectral norm then goes on."""
    return name in module._parameters


class _ShardedCall:
    """Queues the factors of one sharded linear while a split schedule is active.

    Attributes:
        parameters: the weight, and the bias unless the linear is row-parallel: its bias is added after the all-reduce,
            and autograd computes its gradient.
    """

    def __init__(self, owner: WeightGradients, module: nn.Module) -> None:
        self.module: Any = module
        self._owner = owner
        self._bias = module.bias if isinstance(module, ColumnParallelLinear) else None
        self.parameters: tuple[Any, ...] = (module.weight, self._bias)

    def install(self) -> None:
        """Make the linear call this object with its factors."""
        self.module.put_off = self

    def remove(self) -> None:
        """Let the linear compute its weight gradient itself again."""
        del self.module.put_off

    def __call__(self, grad: Tensor, x: Tensor) -> None:
        weight, bias = self.module.weight, self._bias
        trained = bias if bias is not None and bias.requires_grad else None
        self._owner.put(Factors(weight, trained, grad, x, self.module.transposed, products=self.module.products))


class _ForwardCall(Wrapper):
    """Runs in place of one module's ``forward`` while a split schedule is active."""

    slot = ForwardSlot.SPLIT
    _products = SIXTEEN_BIT

    def install(self) -> None:
        """Wrap the forward of the module's class; a forward assigned to this instance is left alone."""
        stack = ForwardStack.of(self.module)
        if stack.runs_class_forward:
            self._products = SIXTEEN_BIT if stack.get(ForwardSlot.PRODUCTS) is None else FLOAT8
            stack.put(self)

    def remove(self) -> None:
        """Remove the wrapper."""
        ForwardStack.of(self.module).remove(self.slot)


class _AttentionCall(_ForwardCall):
    """Queues the factors of the projections of one ``nn.MultiheadAttention``, split over heads or not."""

    def __init__(self, owner: WeightGradients, module: Any) -> None:
        super().__init__(module)
        self._owner = owner
        weights = (module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        split = getattr(module, "_sharding", None) is not None  # its output bias is added after the all-reduce
        output = None if split else module.out_proj.bias
        self.parameters: tuple[Any, ...] = (*weights, module.in_proj_bias, module.out_proj.weight, output)

    def install(self) -> None:
        """Defer the weight gradients of the projections."""
        self.module.put_off = self.put_off
        if not isinstance(self.module, ParallelMultiheadAttention):
            super().install()

    def remove(self) -> None:
        """Stop deferring them."""
        del self.module.put_off
        if not isinstance(self.module, ParallelMultiheadAttention):
            super().remove()

    def put_off(self, name: str, rows: tuple[int, int] | None, grad: Tensor, x: Tensor) -> None:
        """Queue the factors of one projection.

        Args:
            name: ``"out_proj"``, ``"in_proj"`` for the packed weight, or ``"q_proj"``, ``"k_proj"``, ``"v_proj"``.
            rows: half-open range of its rows in the packed weight or bias; ``None`` for all.
            grad: gradient of the projection's output, [.., out].
            x: the projection's input, [.., in].
        """
        module = self.module
        if name == "out_proj":
            weight, bias = module.out_proj.weight, self.parameters[-1]
        else:
            weight, bias = getattr(module, f"{name}_weight"), module.in_proj_bias
        trained = bias if bias is not None and bias.requires_grad else None
        self._owner.put(Factors(weight, trained, grad, x, False, rows if name == "in_proj" else None, rows))

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        masks = (key_padding_mask, attn_mask, is_causal)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and is_ordinary(query):
            return attend_heads(self.module, (query, key, value), masks, need_weights, average_attn_weights)
        return self.forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )


class _LinearCall(_ForwardCall):
    """Runs one linear through the splitting function."""

    def __init__(self, owner: WeightGradients, module: nn.Module) -> None:
        super().__init__(module)
        self._owner = owner
        self._transposed = not isinstance(module, nn.Linear)
        self.parameters: tuple[Any, ...] = (self.module.weight, self.module.bias)

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        if isinstance(x, WholeTensor) and x.along < x.ndim - 1:
            return x.like(self(x.local()))
        gathered = "weight" in vars(module)  # in the place of a part, whose gradient autograd finds
        if gathered or not self._can_split(x, module._parameters.get("weight")):
            return cast(Tensor, self.forward(x))
        x = autocast_input(x)
        anchor = None if x.requires_grad else self._owner.anchor(x.device)
        completed = vars(module).get("bias")  # in the place of a part of the bias, whose gradient autograd finds
        parameters = (module.weight, module.bias if completed is None else None)
        found = _SplitLinear.apply(self._owner, self._products, self._transposed, parameters, x, anchor)
        return cast(Tensor, found if completed is None else found + completed)

    @staticmethod
    def _can_split(x: Any, weight: Any) -> bool:
        return (
            torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and is_ordinary(x)
            and isinstance(weight, nn.Parameter)
            and weight.requires_grad
            and not weight._backward_hooks
        )


class _SplitLinear(torch.autograd.Function):
    """x [.., in] -> x weightᵀ + bias [.., out] (x weight + bias if transposed).

    The parameters are passed in a tuple, which hides them from autograd: otherwise it would call their hooks in ``I``,
    without a gradient. If ``x`` does not require grad, ``anchor`` does, so that autograd runs this backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        owner: WeightGradients,
        products: Products,
        transposed: bool,
        parameters: tuple[nn.Parameter, nn.Parameter | None],
        x: Tensor,
        anchor: Tensor | None,
    ) -> Tensor:
        ctx.owner, ctx.products, ctx.transposed, ctx.parameters = owner, products, transposed, parameters
        ctx.save_for_backward(x)
        weight, bias = parameters
        with torch.autocast(x.device.type, enabled=False):
            matrix = weight.to(x.dtype).t() if transposed else weight.to(x.dtype)
            return of_its_own(products.product(x, matrix, None if bias is None else bias.to(x.dtype)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        weight, bias = ctx.parameters
        trained_bias = bias if bias is not None and bias.requires_grad else None
        ctx.owner.put(Factors(weight, trained_bias, grad, x, ctx.transposed, products=ctx.products))
        if not ctx.needs_input_grad[4]:
            return None, None, None, None, None, None
        matrix = weight.to(grad.dtype)
        x_grad = ctx.products.input_gradient(grad, matrix.t() if ctx.transposed else matrix)
        return None, None, None, None, x_grad, None
