"""Some of a layer's tokens, run through it by themselves: the tensors that they are, and what they may not be used for.

A layer's forward is run on a tensor of the shape of all tokens that stores the rows of some, as over context ranks.
Functions that treat every token alike run on the rows. One that reads other tokens has nobody to ask: it is refused by
its name. Attention is handed to whoever knows its outputs, see `.token_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from lightning_megatron.context_parallel.token_shards import TokenShards
from lightning_megatron.context_parallel.token_split import Run, Scope, TokenSplit
from lightning_megatron.mesh.autograd import innermost_hooks
from lightning_megatron.mesh.torch_functions import name_of


class ReadsOtherTokens(Exception):
    """A function asks for tokens that are not there."""


class NotTokenwise(RuntimeError):
    """A layer that cannot be run on some of its tokens."""


class _Nobody:
    """A group of this rank alone, which has no one to send to."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        raise ReadsOtherTokens


class LayerScope(Scope):
    """State that the tensors of one run of a layer share.

    Args:
        layer: its name.
        given: the option, with its value, for which it runs so.
        attention: answers its calls of attention; by default there must be none.

    Attributes:
        hooks: what autograd hands saved tensors to, while the layer runs; those of a checkpoint in it are others.
    """

    def __init__(self, layer: str, given: str, attention: Callable[..., Any] | None = None) -> None:
        super().__init__("gather")
        self.hooks: Any = None
        self.layer, self.given, self.attention = layer, given, attention

    def refuse(self, what: str) -> NoReturn:
        """Refuse the layer.

        Raises:
            NotTokenwise: always.
        """
        raise NotTokenwise(
            f"`{self.given}` runs `{self.layer}` on some of its tokens at a time, besides attention, but there {what}. "
            "Use `activation_offload='all'`, or name other layers: {'tokens': share, 'layers': [...]}."
        )


@dataclass(frozen=True)
class RowSplit(TokenSplit):
    """A dim of ``length`` tokens of which the rows of some are here, and the others' are nowhere."""

    def join(self, local: Tensor, dim: int) -> Tensor:
        """Refused: the other tokens are not there."""
        raise ReadsOtherTokens

    def summed(self, partial: Tensor) -> Tensor:
        """Refused: see `join`."""
        raise ReadsOtherTokens

    def check_mixes(self) -> None:
        """Refused: see `join`."""
        raise ReadsOtherTokens

    def sliced(self, start: int, stop: int) -> tuple[TokenSplit, int, int]:
        """Refused: see `join`. The other tokens are not there either to be left out."""
        if (start, stop) != (0, self.length):
            raise ReadsOtherTokens
        return self, 0, self.counts[0]

    def flattened(self, before: int, after: int) -> TokenSplit:
        """As that of a `TokenSplit`."""
        split = super().flattened(before, after)
        return RowSplit(split.group, split.length, split.runs, split.scope, (before, self, after))

    def refuse_bypass(self, shape: Sequence[int]) -> None:
        """Refuse a function whose gradient would not be known."""
        scope: Any = self.scope
        scope.refuse(
            f"a tensor of shape {tuple(shape)} is given to code that torch's functions do not see: a custom "
            "`autograd.Function`, `torch.utils.checkpoint(use_reentrant=True)` or an operator written in C++"
        )


class RowShards(TokenShards):
    """A tensor [.., tokens, ..] that stores the rows of some of a layer's tokens."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scope: Any = next((x.spread.scope for x in _all(args, kwargs) if isinstance(x, RowShards)), None)  # type: ignore[attr-defined]
        if scope is not None and scope.hooks is not None and scope.hooks != innermost_hooks():
            scope.refuse("`torch.utils.checkpoint`, or another hook on saved tensors, decides what is kept")
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except ReadsOtherTokens:
            scope.refuse(f"`{name_of(func)}` reads other tokens than those it computes, or may do so")


def _all(args: Any, kwargs: Any) -> Any:
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, list | tuple):
            yield from _all(value, None)
        else:
            yield value


def rows_of_input(rows: Tensor, dim: int, length: int, runs: Sequence[Run], scope: Scope) -> RowShards:
    """The tensor of ``length`` tokens along ``dim`` of which ``rows`` are those of ``runs``."""
    group: Any = _Nobody()
    return RowShards.show(rows, RowSplit(group, length, (tuple(runs),), scope), dim)


def later_runs(runs: Sequence[Run], first: int) -> tuple[Run, ...]:
    """The remainder of a rank's runs without its ``first`` rows."""
    found, behind = [], 0
    for start, stop in runs:
        skipped = min(max(0, first - behind), stop - start)
        behind += stop - start
        if start + skipped < stop:
            found.append((start + skipped, stop))
    return tuple(found)
