"""Heads whose logits are put off until a loss asks for pieces of them, in modules that know nothing of it.

A head is a linear layer outside of the repeated ones: one that has as many outputs as an embedding has entries, or the
most outputs of all; or a step's own product with the table of an embedding (``F.linear(x, self.embedding.weight)``).
Its call returns `LazyLogits`, which any code may use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.logits import VocabParallelLogits
from lightning_megatron.layers.multiply.products import SIXTEEN_BIT
from lightning_megatron.layers.multiply.weight_view import autocast_input
from lightning_megatron.layers.pieces import noted_rules  # noqa: F401  (gives LazyLogits its rules)
from lightning_megatron.layers.pieces.head_rows import Pieces
from lightning_megatron.layers.pieces.lazy_logits import LazyLogits, computed
from lightning_megatron.layers.whole import NeedsWhole, WholeTensor
from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.messages.collectives import copy_to_group, gather_for_shards
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.pipeline.elsewhere.abstract import is_ordinary
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack, Wrapper

_log = logging.getLogger(__name__)


class LazyHeads:
    """The heads of one module; from :meth:`open` to :meth:`close`.

    Args:
        module: the user's module.
        layers: names of its repeated layers; none where it has none.
        count: pieces of the tokens of a loss, or ``"auto"``.
        calls: whether this rank calls the heads: the last stage does.

    Attributes:
        pieces: what became of the logits.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str], count: int | str, calls: bool = True) -> None:
        self._module, self._calls, self.pieces = module, calls, Pieces(count)
        self.runs = False
        self.met = 0
        linears, tables = _outside(module, layers)
        sizes = {table.num_embeddings for table in tables}
        most = max((linear.out_features for linear in linears.values()), default=0)
        self._heads = [
            _HeadCall(self, linear)
            for linear in linears.values()
            if linear.out_features == most or linear.out_features in sizes
        ]
        lacking = not any(linear.out_features in sizes for linear in linears.values())
        self._tables = [table for table in tables if lacking]

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyHeads:
        return self  # the heads of a copy, which a step is tried on, are called as these are

    def __reduce__(self) -> Any:
        return type(None), ()

    def open(self) -> None:
        """Let the heads put off their products in steps."""
        for head in self._heads:
            head.install()

    def close(self) -> None:
        """Leave the heads as they were."""
        for head in self._heads:
            ForwardStack.of(head.module).remove(head.slot)

    @property
    def takes_calls(self) -> bool:
        """Whether a head that is called now is called by a step, or by its recomputation."""
        return self.runs or in_backward()

    def run(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Run the user's step; logits that it returns are computed before they leave it.

        Raises:
            RuntimeError: nothing in the step was found to be a head.
        """
        self.met, first = 0, not self.pieces.done and not self.pieces.whole
        tables: AbstractContextManager[Any] = _Products(self) if self._tables else nullcontext()
        self.runs = True
        try:
            with tables:
                output = tree_map(computed, step(batch))
        finally:
            self.runs = False
        if self._calls and not self.met and torch.is_grad_enabled():
            raise RuntimeError(
                f"`loss_chunks={self.pieces.count!r}` found no head in the step of `{type(self._module).__name__}`: "
                "it knows linear layers outside of the repeated ones, called as modules that are not compiled, and "
                "products with the whole table of an embedding, `F.linear(x, embedding.weight)` or `x @ "
                "embedding.weight.T`. Leave `loss_chunks` out."
            )
        if first and self.pieces.whole and not self.pieces.done and torch.is_grad_enabled():
            names = ", ".join(f"`{name}`" for name in self.pieces.whole)
            _log.warning("`loss_chunks` saves nothing: %s made the logits whole, and no loss took pieces.", names)
        return output

    def shared(self, parameter: Tensor) -> bool:
        """Whether a tensor is the table of an embedding that a step multiplies by itself."""
        return any(parameter is table.weight for table in self._tables)

    def report(self) -> str:
        """Report of this rank: which functions took logits in pieces, and which made them whole."""
        lines = [f"logits in pieces of the tokens: {self.pieces.count}"]
        lines += [f"  in pieces {count:>6} x  `{name}`" for name, count in self.pieces.done.most_common()]
        lines += [f"  whole     {count:>6} x  `{name}`" for name, count in self.pieces.whole.most_common()]
        return "\n".join(lines)


def _outside(module: nn.Module, layers: Sequence[str]) -> tuple[dict[str, nn.Linear], list[nn.Embedding]]:
    """Linear layers and embeddings outside of the repeated layers."""
    inside: Any = Parts(list(layers)) if layers else ()
    names = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    lists: Any = Parts(names) if names else ()
    outside = [(name, part) for name, part in module.named_modules() if name not in inside]
    tables = [part for _, part in outside if isinstance(part, nn.Embedding)]
    sizes = {table.num_embeddings for table in tables}
    linears = {
        name: part
        for name, part in outside
        if isinstance(part, nn.Linear) and (name not in lists or part.out_features in sizes)
    }
    return linears, tables


class _HeadCall(Wrapper):
    """Runs in place of a head's ``forward``."""

    slot = ForwardSlot.PIECES

    def __init__(self, owner: LazyHeads, module: nn.Module) -> None:
        super().__init__(module)
        self._owner = owner

    def __call__(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # compiled code computes whole logits
            return self.forward(input)
        found = self._put_off(input) if self._owner.takes_calls else None
        return self.forward(input) if found is None else found

    def _put_off(self, x: Tensor) -> LazyLogits | None:
        owner, layer = self._owner, self.module
        if not _is_of_rows(x):  # a stand-in for what another stage has
            owner.met += 1
            return None
        if not self.stack.runs_class_forward:
            return None
        if type(layer).forward is nn.Linear.forward or _is_whole(layer):
            return lazy_product(owner, x, layer.weight, layer.bias)
        return _lazy_split(owner, layer, x) if isinstance(layer, ColumnParallelLinear) else None


def _is_whole(layer: Any) -> bool:
    return isinstance(layer, ColumnParallelLinear) and layer._sharding is None


def _is_of_rows(x: Any) -> bool:
    """Whether a head's input is here: of numbers, all or of some tokens."""
    if isinstance(x, WholeTensor):
        return x.is_by_rows and not isinstance(x, LazyLogits) and x.ndim > 1
    return is_ordinary(x) and x.ndim > 1 and x.is_floating_point()


def lazy_product(owner: LazyHeads, x: Tensor, weight: Any, bias: Any) -> LazyLogits | None:
    """``F.linear``, put off; ``None`` if it cannot be."""
    if not all(value is None or is_ordinary(value) for value in (weight, bias)):
        return None
    return _lazy(owner, x, F.linear, weight, bias, weight.shape[0])


def _lazy(
    owner: LazyHeads, x: Tensor, product: Callable[..., Tensor], weight: Any, bias: Any, classes: int
) -> LazyLogits | None:
    # Views: the step may see the parameters in another way by the time a loss asks for the logits.
    weight, bias = weight.view_as(weight), None if bias is None else bias.view_as(bias)
    multiply: Callable[[Tensor], Tensor] = partial(product, weight=weight, bias=bias)
    if weight.dtype in (torch.bfloat16, torch.float16) and torch.is_grad_enabled() and weight.requires_grad:
        multiply = _AddedUpWide(weight, bias, product)
    try:
        found = LazyLogits.of(x, multiply, classes, (weight, bias), owner.pieces)
    except NeedsWhole:
        return None
    owner.met += 1
    return found


class _AddedUpWide:
    """A product with a 16-bit weight whose gradients by the pieces are added up in float32, and rounded once."""

    def __init__(self, weight: Tensor, bias: Tensor | None, product: Callable[..., Tensor]) -> None:
        self._product, self._dtype = product, weight.dtype
        self._weight, self._bias = weight.float(), None if bias is None else bias.float()

    def __call__(self, rows: Tensor) -> Tensor:
        bias = None if self._bias is None else self._bias.to(self._dtype)
        return self._product(rows, weight=self._weight.to(self._dtype), bias=bias)


def _lazy_split(owner: LazyHeads, layer: Any, x: Tensor) -> LazyLogits | None:
    """The product of a head that is split over the tensor group: its logits stay split over classes."""
    sharding = layer._sharding
    entry = sharding.entry
    if sharding.output != "logits" or layer.transposed or entry.stream is not None or layer.products is not SIXTEEN_BIT:
        return None
    brought = autocast_input(x.local() if isinstance(x, WholeTensor) else x)
    if entry.reduces and entry.gather_dim is None:
        brought = copy_to_group(brought, entry.group)
    elif entry.reduces:
        brought = gather_for_shards(brought, entry.gather_dim if brought.dim() > 2 else 0, entry.group)
    rows = x.like(brought) if isinstance(x, WholeTensor) else brought
    product = partial(_split_product, group=entry.group, classes=sharding.vocabulary)
    return _lazy(owner, rows, product, layer.weight, layer.bias, sharding.vocabulary)


def _split_product(rows: Tensor, group: Any, classes: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    return VocabParallelLogits.wrap(F.linear(rows, weight, bias), group, classes)


class _Products(TorchFunctionMode):
    """Puts off products with the tables of embeddings, which a step takes itself."""

    def __init__(self, owner: LazyHeads) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = self._product(func, *args, **kwargs) if func in _PRODUCTS and len(args) > 1 else None
        return func(*args, **kwargs) if found is None else found

    def _product(self, func: Any, x: Any, weight: Any, bias: Any = None, **kwargs: Any) -> LazyLogits | None:
        if func is not F.linear:
            transposed = isinstance(weight, Tensor) and weight.ndim == 2 and weight._base is not None
            if not transposed or weight.stride(0) != 1:
                return None
            weight = next((table.weight for table in self._owner._tables if weight._base is table.weight), None)
        if weight is None or not self._owner.shared(weight) or kwargs:
            return None
        if _is_of_rows(x):
            return lazy_product(self._owner, x, weight, bias)
        self._owner.met += 1
        return None


_PRODUCTS = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
__all__ = ["LazyHeads"]
