"""Computes logits from the input rows of a head: for any of the rows, as often as needed.

The product of a head, and what a step does to logits token by token before the loss (casts, a temperature, a soft cap,
``log_softmax``), are noted and not done::

    rows [tokens, hidden] ──▶ product ──▶ / 0.7 ──▶ float() ──▶ logits [tokens, vocabulary]
                              └────────── HeadRows ──────────┘

A piece of the rows goes through them when a loss needs its logits, and in the backward again. Tensors that take part
must not change in between, which is checked by their versions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_megatron.layers.whole import NeedsWhole, SplitDim
from lightning_megatron.mesh.autograd import version_of
from lightning_megatron.mesh.precisions import Casting, cast_as, casting_of

AUTO_BYTES = 64 * 2**20
"""Size of a piece's logits in float32, for ``loss_chunks="auto"``."""


class Pieces:
    """Into how many pieces the tokens of a loss are cut, and what became of the logits.

    Args:
        count: number of pieces, or ``"auto"`` for pieces of at most `AUTO_BYTES`.

    Attributes:
        done: how often a function took logits in pieces, by its name.
        whole: how often one made them whole.
    """

    def __init__(self, count: int | str) -> None:
        self.count = count
        self.done: Counter[str] = Counter()
        self.whole: Counter[str] = Counter()

    def size(self, tokens: int, vocabulary: int) -> int:
        """Tokens of a piece; the last one may be smaller.

        Args:
            tokens: of this rank.
            vocabulary: classes.
        """
        count = math.ceil(tokens * vocabulary * 4 / AUTO_BYTES) if self.count == "auto" else int(self.count)
        return max(1, math.ceil(tokens / max(1, count)))


class _Values:
    """Placeholder, among the arguments of a step, for the values of the step before."""


VALUES = _Values()


@dataclass(frozen=True)
class DelayedCall:
    """A function of logits that treats every token alike, to be done later: [n, classes] -> [n, classes].

    Attributes:
        func: of torch.
        args: with `VALUES` where logits stand.
        kwargs: the same.
        casting: autocast's state where the user's code called it.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    casting: Casting

    def __call__(self, values: Tensor) -> Tensor:
        args, kwargs = tree_map(lambda v: values if v is VALUES else v, (self.args, dict(self.kwargs)))
        with cast_as(self.casting):
            found: Tensor = self.func(*args, **kwargs)
        return found


@dataclass(frozen=True, eq=False)
class HeadRows(SplitDim):
    """The classes of logits that are not computed yet: each row gives ``length`` of them.

    Attributes:
        multiply: rows [.., hidden] -> [.., classes], as a tensor or as `VocabParallelLogits`.
        used: tensors that the product and the steps read, with their versions.
        casting: autocast's state where the head was called.
        differentiable: whether gradients were enabled there.
        dtype: of the logits.
        pieces: how many, and what became of them.
        steps: done with the product, in order.
        shown: number of tensors that show these logits; several are views of each other.
    """

    multiply: Callable[[Tensor], Tensor] = torch.clone
    used: tuple[tuple[Tensor, int], ...] = ()
    casting: Casting = ("cpu", False, torch.bfloat16)
    differentiable: bool = True
    dtype: torch.dtype = torch.float32
    pieces: Pieces = field(default_factory=lambda: Pieces(1))
    steps: tuple[DelayedCall, ...] = ()
    shown: list[int] = field(default_factory=lambda: [0])

    def logits(self, rows: Tensor) -> Tensor:
        """The logits of some rows: [.., hidden] -> [.., classes].

        Raises:
            RuntimeError: a tensor that takes part has changed since the head was called.
        """
        for tensor, version in self.used:
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} was changed in place after logits had been asked of it, "
                    "and before `loss_chunks` computed them: change a clone, or leave `loss_chunks` out."
                )
        with cast_as(self.casting):
            found = self.multiply(rows)
        for step in self.steps:
            found = step(found)
        return found

    def then(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> HeadRows:
        """The same with one more step.

        Raises:
            NeedsWhole: its result is not one row of classes per token on the same device.
        """
        step = DelayedCall(func, args, kwargs, casting_of(self.casting[0]))
        used = tuple((v, version_of(v)) for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor))
        return replace(self, steps=(*self.steps, step), used=(*self.used, *used), shown=[0])

    def settled(self, rows: Tensor) -> HeadRows:
        """The same with the dtype of its logits, found by computing those of zero rows.

        Args:
            rows: [.., hidden], this rank's.
        """
        with torch.no_grad():
            found = self.logits(rows.new_empty((0, rows.shape[-1])))
        if not found.is_floating_point() or found.shape != (0, self.length) or found.device != rows.device:
            raise NeedsWhole
        return replace(self, dtype=found.dtype)

    def dtype_of(self, local: Tensor) -> torch.dtype:
        """The dtype of the logits, which need not be that of the rows."""
        return self.dtype

    def refuse_bypass(self, shape: Any) -> None:
        """Refuse a function whose gradient would not be known.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"logits of shape {tuple(shape)}, which `loss_chunks` computes in pieces of tokens, were given to code "
            "that torch's functions do not see: a custom `autograd.Function`, a backward hook of the head, "
            "`torch.utils.checkpoint(use_reentrant=True)`, `torch.func` or an operator written in C++. Use torch's own "
            "functions there, or leave `loss_chunks` out."
        )
