"""Logits of global shape that hold the rows they follow from, until a function needs them.

Views of tokens are views of the rows. Functions that treat all tokens alike are noted. A loss, and a reduction over
classes, computes the logits of a piece of the tokens at a time, in the backward again, so that they are never whole.
Any other function computes the whole logits first, exactly as without pieces, and is counted.

The rows may be those of some tokens (`lightning_megatron.context_parallel`), and their product may stay split over
classes (`lightning_megatron.layers.logits`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.layers.pieces.head_rows import HeadRows, Pieces
from lightning_megatron.layers.whole import NeedsWhole, Rule, WholeTensor
from lightning_megatron.layers.whole.gathered_views import ShownFirst
from lightning_megatron.mesh.autograd import version_of
from lightning_megatron.mesh.precisions import casting_of
from lightning_megatron.mesh.torch_functions import METADATA, is_in_place, name_of


class LazyLogits(ShownFirst, WholeTensor):
    """A tensor of global shape [.., classes, ..] that stores rows [.., hidden, ..].

    Attributes:
        rules: the functions that take pieces, or note what is to be done.
    """

    rules: ClassVar[Mapping[Any, Rule]] = {}
    _computed: Tensor | None = None

    @classmethod
    def of(
        cls, rows: Tensor, multiply: Callable[[Tensor], Tensor], classes: int, used: tuple[Any, ...], pieces: Pieces
    ) -> LazyLogits:
        """The logits of a head that was called with ``rows``.

        Args:
            rows: [.., hidden]; if split, then by rows.
            multiply: this rank's rows [.., hidden] -> [.., classes]; no collective but those of its result.
            classes: how many.
            used: parameters of the head, or ``None`` for one that it lacks.
            pieces: how many.
        """
        grad, parameters = torch.is_grad_enabled(), [value for value in used if value is not None]
        if not grad:
            rows = rows.detach()
        elif not rows.requires_grad and any(value.requires_grad for value in parameters):
            start = (rows.local() if isinstance(rows, WholeTensor) else rows).detach().requires_grad_()
            rows = rows.like(start) if isinstance(rows, WholeTensor) else start
        own = rows.local() if isinstance(rows, WholeTensor) else rows
        head = HeadRows(
            *(None, classes, multiply),  # type: ignore[arg-type]
            used=tuple((value, version_of(value)) for value in (own, *parameters)),
            casting=casting_of(rows.device.type),
            differentiable=grad,
            pieces=pieces,
        )
        return cls.show(rows, head.settled(own), rows.ndim - 1)

    @classmethod
    def show(cls, local: Tensor, split: Any, dim: int) -> Self:
        """Logits of ``local`` rows; counted among those of the same product."""
        split.shown[0] += 1
        return super().show(local, split, dim)

    @property
    def head(self) -> HeadRows:
        """How they follow from the rows."""
        return cast(HeadRows, self.spread)

    def full(self) -> Tensor:
        """The logits, computed whole once; split as the rows are, and as the head's weight is."""
        if self._computed is None:
            rows, head = self.local().movedim(self.along, -1), self.head
            with torch.set_grad_enabled(head.differentiable):
                found = self.head.logits(rows.local() if isinstance(rows, WholeTensor) else rows)
                if isinstance(rows, WholeTensor):
                    found = rows.like(found.full() if isinstance(found, WholeTensor) else found)
                self._computed = found.movedim(-1, self.along)
        return self._computed

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        found = self.full()
        return (found.full() if isinstance(found, WholeTensor) else found).detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(issubclass(kind, ShownFirst) and not issubclass(kind, LazyLogits) for kind in types):
            return NotImplemented
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        lazy = list(_lazy((args, kwargs)))
        for tensor in lazy:
            tensor.local()  # which refuses what a custom function returned
        rule = cls.rules.get(func) if all(tensor._computed is None for tensor in lazy) else None
        if rule is not None and "out" not in kwargs:
            with contextlib.suppress(NeedsWhole):
                return rule(func, *args, **kwargs)
        return _on_computed(func, args, kwargs, lazy)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _ALIASES:
            return super().__torch_dispatch__(func, types, args, kwargs)
        shape = next(_lazy((args, kwargs or {}))).shape
        raise RuntimeError(
            f"logits of shape {tuple(shape)}, which `loss_chunks` computes in pieces of tokens, were given to `{func}` "
            "by code that torch's functions do not see. Use torch's own functions there, or leave `loss_chunks` out."
        )


def _lazy(values: Any) -> Iterator[LazyLogits]:
    return (value for value in tree_leaves(values) if isinstance(value, LazyLogits))


def _on_computed(func: Any, args: Any, kwargs: Any, lazy: list[LazyLogits]) -> Any:
    """Run a function on whole logits; one that writes into them finds them computed from then on."""
    first = args[0] if args and isinstance(args[0], LazyLogits) else None
    target = first if is_in_place(func, kwargs) else None
    if first is not None and (target is not None or func in _WATCHES) and first.head.shown[0] > 1:
        raise RuntimeError(
            f"`{name_of(func)}` was asked of logits of shape {tuple(first.shape)} after views of them, or a loss, had "
            "been, which `loss_chunks` computes from the head's input: call it first, use its result (`logits = "
            "logits.masked_fill(...)`), or leave `loss_chunks` out."
        )
    for tensor in lazy:
        if tensor._computed is None:
            tensor.head.pieces.whole[name_of(func)] += 1
    args, kwargs = tree_map(lambda value: value.full() if isinstance(value, LazyLogits) else value, (args, kwargs))
    found = func(*args, **kwargs)
    if target is None or found is None:
        return found
    target._computed = found
    return target


def computed(value: Any) -> Any:
    """A value that leaves a step: logits that it returns are whole."""
    if isinstance(value, LazyLogits):
        if value._computed is None:
            value.head.pieces.whole["return"] += 1
        return value.full()
    return value


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_WATCHES = (Tensor.register_hook, Tensor.retain_grad)
