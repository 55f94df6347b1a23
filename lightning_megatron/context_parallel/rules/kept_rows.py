"""Keeps what attention by heads gives once: as rows, which the layer after it saves anyway.

Attention saves its output for its backward, with some heads of all tokens; the layer after it saves the same numbers
as all heads of some tokens. The former is freed, and made of the latter again, by one exchange, when the backward of
attention asks for it::

    forward    q, k, v ──attend──▶ o (heads) ──exchange──▶ o (rows) ──▶ the next layer
               kept                freed                   kept, once
    backward                       o (heads) ◀──exchange── o (rows)

What else attention saves, and the rows, are given to the hooks that are there already (of recomputation, say).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Saved:
    """A tensor that attention has saved.

    Attributes:
        tensor: until it is given to `kept`.
        kept: what the hooks around attention have made of it, or of the rows that it can be made of.
        form: size and stride of an output that was freed; ``None`` for anything else.
    """

    form: tuple[torch.Size, tuple[int, ...]] | None = None
    kept: Any = None
    version = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor


def kept_as_rows(
    attend: Callable[[], Tensor], to_rows: Callable[[Tensor], Tensor], to_heads: Callable[[Tensor], Tensor]
) -> Tensor:
    """``to_rows(attend())``, of which only the rows are kept for the backward.

    Args:
        attend: gives [.., heads of this rank, tokens, d].
        to_rows: makes [.., heads, rows of this rank, d] of it, with a gradient.
        to_heads: undoes that, without one.
    """
    if not torch.is_grad_enabled():
        return to_rows(attend())
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)
    saved: list[_Saved] = []

    def pack(tensor: Tensor) -> _Saved:
        saved.append(_Saved(tensor))
        return saved[-1]

    def keep(entry: _Saved, tensor: Tensor) -> None:
        entry.tensor, entry.version = None, tensor._version
        entry.kept = tensor.detach() if around is None else around[0](tensor)

    def unpack(entry: _Saved) -> Tensor:
        tensor: Tensor = entry.kept if around is None else around[1](entry.kept)
        if around is None and tensor._version != entry.version:
            raise RuntimeError(
                "the output or the mask of attention, needed for its gradient, was changed in place after it; change "
                "a clone instead"
            )
        return tensor if entry.form is None else _formed(to_heads(tensor), *entry.form)

    with saved_tensors_hooks(pack, unpack):
        found = attend()
    outputs = [entry for entry in saved if entry.tensor is not None and _is_same(entry.tensor, found)]
    for entry in saved:
        if entry.tensor is not None and entry not in outputs:
            keep(entry, entry.tensor)
    rows = to_rows(found)
    for entry in outputs:
        entry.form = found.shape, found.stride()
        keep(entry, rows.detach())
    return rows


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    one, two = ((x.untyped_storage()._cdata, x.storage_offset(), x.dtype, x.shape, x.stride()) for x in (tensor, other))
    return one == two


def _formed(tensor: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The numbers as they lay in memory: kernels of a backward may count on that."""
    return tensor.new_empty(0).new_empty_strided(shape, stride).copy_(tensor)
