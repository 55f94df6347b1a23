"""Messages as nodes of autograd's graph that all ranks have alike, whether rows of theirs have gradients or not.

A message whose backward one rank runs and another does not would be waited for in vain. So each takes an *anchor*,
which has gradients whenever they are computed at all, gives a *root* that stands for it where nothing is computed from
its rows, and sends zeros back where they got no gradient::

    rows, anchor ──▶ message ──▶ rows, root
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def anchor_for(rows: Tensor, *, wanted: bool = True) -> Tensor:
    """A number on the device of ``rows`` that makes a message part of all ranks' graphs, or of none.

    Args:
        rows: whether they have gradients may differ between ranks.
        wanted: whether the message is to be part of a graph for its own sake.
    """
    return torch.zeros((), device=rows.device, requires_grad=wanted and torch.is_grad_enabled())


def leave(ctx: Any, arrived: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """Results of a message's forward: rows, and the number that stands for them.

    A layer that is recomputed is so before the messages of its backward, which is why something is saved.
    """
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(anchor)
    ctx.kind = arrived.shape, arrived.dtype
    return arrived, anchor.new_zeros(())


def gradient_of(ctx: Any, grad: Tensor | None) -> Tensor:
    """The gradient of the rows, zeros if there is none, once a layer that is recomputed has been so."""
    (anchor,) = ctx.saved_tensors
    shape, dtype = ctx.kind
    return torch.zeros(shape, dtype=dtype, device=anchor.device) if grad is None else grad
