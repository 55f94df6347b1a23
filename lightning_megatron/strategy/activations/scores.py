"""Attention written as products, in a layer that runs again on some of its tokens: found, and not repeated.

A product of rows with transposed rows makes *scores*, [.., queries, keys]; what is computed of scores by rows (a mask
added, softmax, dropout) is scores; a product of scores with rows, or a sum over keys, ends them::

    forward     q @ k.mT ─▶ scores ─▶ softmax ─▶ scores @ v ─▶ o        o is kept, for all tokens
    again       q, k              (shapes only)          v     o        q, k, v of some tokens; o is given

Whatever is saved between the products is kept whole. When tokens are computed again, scores are tensors of no values
(torch's ``meta`` device), so that nothing of the order of tokens × tokens is computed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.torch_functions import METADATA, getters, name_of
from lightning_megatron.strategy.activations.token_rows import LayerScope, RowShards

T = Tensor
_PRODUCTS = {torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm, torch.bmm, T.bmm}
_ADDED_TO = {torch.baddbmm, T.baddbmm}
_DEVICE = set(getters("device"))


class Scores(TorchFunctionMode):
    """Follows scores through the functions of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self._scores: Any = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shown = [x for x in _tensors((*args, *kwargs.values())) if isinstance(x, WholeTensor)]
        source = next((x for x in shown if x in self._scores), None)
        if func in METADATA:
            return self.told(func, args, kwargs) if source is not None else func(*args, **kwargs)
        if source is None:
            return self._may_begin(func, args, kwargs)
        if func in _PRODUCTS and args[0] is source:
            right = args[1]
            right = right if not isinstance(right, WholeTensor) or right in self._scores else _dense(right, False)
            return self.last(func, source, _as_autocast(right), *args[2:])
        return self.follow(func, args, kwargs, source)

    def note(self, found: Any) -> Any:
        """Remember that tensors are scores."""
        for x in _tensors((found,)):
            if isinstance(x, WholeTensor):
                self._scores[x] = True
        return found

    def is_scores(self, value: Any) -> bool:
        """Whether a tensor is."""
        return isinstance(value, WholeTensor) and value in self._scores

    def _may_begin(self, func: Any, args: Any, kwargs: Any) -> Any:
        left, right = _operands(func, args, kwargs)
        if not isinstance(left, WholeTensor) or not isinstance(right, WholeTensor):
            return func(*args, **kwargs)
        if left.along != left.ndim - 2 or right.along != right.ndim - 1 or left.spread.length != right.spread.length:
            return func(*args, **kwargs)
        queries, keys = _dense(_as_autocast(left), False), _dense(_as_autocast(right), True)
        others = {id(left): queries, id(right): keys}
        args, kwargs = tree_map(lambda value: others.get(id(value), value), (args, kwargs))
        return self.note(self.first(func, args, kwargs, queries, keys))

    @abstractmethod
    def first(self, func: Any, args: Any, kwargs: Any, queries: WholeTensor, keys: WholeTensor) -> Any:
        """The product that makes scores."""

    @abstractmethod
    def follow(self, func: Any, args: Any, kwargs: Any, source: WholeTensor) -> Any:
        """A function of scores."""

    @abstractmethod
    def last(self, func: Any, source: WholeTensor, right: Any, *rest: Any) -> Any:
        """The product of scores with rows."""

    def told(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer of a function that asks for the shape, dtype or device of scores."""
        return func(*args, **kwargs)


class KeptScores(Scores):
    """In the forward of all tokens.

    Args:
        inside: ``inside(run, *operands)`` calls ``run()``; what is saved in it belongs to attention.
        keep: keeps what scores end with.
    """

    def __init__(self, inside: Callable[..., Any], keep: Callable[[WholeTensor], Any]) -> None:
        super().__init__()
        self._inside, self._keep = inside, keep

    def first(self, func: Any, args: Any, kwargs: Any, queries: WholeTensor, keys: WholeTensor) -> Any:
        """As the function does, on the rows."""

        def run() -> Any:
            if not isinstance(queries, RowShards):
                return func(*args, **kwargs)
            local = tree_map(_local, (args, kwargs))
            return queries.like(func(*local[0], **local[1]))

        return self._inside(run, (queries.local(), -2), (keys.local(), -1))

    def follow(self, func: Any, args: Any, kwargs: Any, source: WholeTensor) -> Any:
        """The same; results without a dim of keys are kept."""
        found = self._inside(lambda: func(*args, **kwargs))
        for each in _tensors((found,)):
            if isinstance(each, WholeTensor):
                self._keep(each) if ends(each, source) else self.note(each)
        return found

    def last(self, func: Any, source: WholeTensor, right: Any, *rest: Any) -> Any:
        """The same; the product is kept."""

        def run() -> Any:
            if not isinstance(source, RowShards):
                return func(source, right, *rest)
            return source.like(func(source.local(), _local(right), *rest))

        rows = isinstance(right, WholeTensor) and not self.is_scores(right) and right.along == right.ndim - 2
        found = self._inside(run, *([(right.local(), -2)] if rows else ()))
        self._keep(found)
        return found


class GivenScores(Scores):
    """When some tokens are computed again.

    Args:
        scope: refuses what needs values.
        device: of the layer.
        record: ``record(which, rows)``: an operand of the call of attention that is met now.
        given: makes, from what has its split, the rows of what was kept; the call is over then.
    """

    def __init__(
        self,
        scope: LayerScope,
        device: torch.device,
        record: Callable[[int, Tensor], None],
        given: Callable[[WholeTensor | None], Any],
    ) -> None:
        super().__init__()
        self._scope, self._device, self._record, self._given = scope, device, record, given

    def first(self, func: Any, args: Any, kwargs: Any, queries: WholeTensor, keys: WholeTensor) -> Any:
        """Queries and keys are noted; scores have no values."""
        self._record(0, queries.local())
        self._record(1, keys.local())
        self._given(None)
        batch = torch.broadcast_shapes(queries.shape[:-2], keys.shape[:-2])
        shape = (*batch, queries.local().shape[-2], keys.shape[-1])
        return queries.like(torch.empty(shape, dtype=queries.dtype, device="meta"), len(shape) - 2)

    def follow(self, func: Any, args: Any, kwargs: Any, source: WholeTensor) -> Any:
        """Shapes only; results without a dim of keys are given."""
        found = self._without_values(func, args, kwargs)
        self._given(None)

        def known(value: Any) -> Any:
            if not isinstance(value, WholeTensor):
                return value
            return self._given(value) if ends(value, source) else self.note(value)

        return tree_map(known, found)

    def last(self, func: Any, source: WholeTensor, right: Any, *rest: Any) -> Any:
        """Values are noted, and the product is given."""
        if isinstance(right, WholeTensor) and not self.is_scores(right) and right.along == right.ndim - 2:
            self._record(0, right.local())
        self._given(None)
        return self._given(source)

    def told(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The device is the layer's."""
        return self._device if func in _DEVICE else func(*args, **kwargs)

    def _without_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(self._emptied, (args, kwargs))
        try:
            with torch.no_grad():
                return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error).lower():
                raise
            self._scope.refuse(f"`{name_of(func)}` needs the scores of attention, which are not computed again")

    def _emptied(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("meta")
        if not isinstance(value, Tensor) or self.is_scores(value):
            return value
        if isinstance(value, WholeTensor):
            return value.like(torch.empty_like(value.local(), device="meta", requires_grad=False))
        return torch.empty_like(value, device="meta", requires_grad=False)


def ends(found: WholeTensor, source: WholeTensor) -> bool:
    """Whether a result computed from scores has lost the dim of keys, as a sum or a maximum over the keys."""
    return found.numel() * source.spread.length <= source.numel()


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if func in _PRODUCTS and len(args) == 2:
        return args[0], args[1]
    if func in _ADDED_TO:
        named = dict(zip(("batch1", "batch2"), args[1:3], strict=False)) | kwargs
        return named.get("batch1"), named.get("batch2")
    return None, None


def _dense(x: WholeTensor, transposed: bool) -> WholeTensor:
    """Rows without gaps, so that a product saves no copy of its own."""
    return x.like(x.local().mT.contiguous().mT if transposed else x.local().contiguous())


def _as_autocast(x: Any) -> Any:
    """As autocast hands it to a product."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _local(value: Any) -> Any:
    return value.local() if isinstance(value, WholeTensor) else value


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(cast(Any, value))


__all__ = ["GivenScores", "KeptScores", "Scores"]
