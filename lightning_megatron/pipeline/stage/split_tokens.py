"""How a stage meets layers whose tokens are split over context ranks.

A boundary carries this rank's rows of a split tensor, to the same context rank of the next stage, which makes a tensor
of global shape of them again::

    stage 0   embedding ── whole ──▶ enter ── rows ▶ layers ── rows ──send──▶   stage 1   rows ─ joined ▶ layers ── loss
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_megatron.layers.all_here import all_tokens_here
from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.autograd import hooks_keep
from lightning_megatron.pipeline.elsewhere.effects import Effect
from lightning_megatron.pipeline.stage.boundary import Boundary, Leaf


class SplitsTokens(Protocol):
    """Splits the tokens of a module's steps."""

    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a layer that is about to run, its first tensor cut to this rank's rows."""

    def leave(self, layer: nn.Module) -> None:
        """Let whoever called the layer see what it wrote into its input."""

    def cut_at(self, layer: nn.Module, value: Tensor) -> WholeTensor:
        """This rank's rows of a tensor that a layer is given whole."""

    def parted(self, tensor: WholeTensor) -> tuple[Tensor, Hashable]:
        """This rank's rows, and what another process has to know of how they are split."""

    def joined(self, rows: Tensor, described: Hashable) -> WholeTensor:
        """The tensor of global shape again."""


def become_split(stand_in: Tensor, split: WholeTensor) -> bool:
    """Turn the very tensor that the user's code passed into a split one, so that other uses of it see it too.

    Returns:
        Whether it could be done: nothing but names of Python's holds the stand-in.
    """
    if hooks_keep():
        return False
    try:
        torch.utils.swap_tensors(stand_in, split)
    except RuntimeError:
        return False
    return True


def boundary_of(
    tensors: Sequence[Tensor], places: Sequence[int], effects: tuple[Effect, ...] | None, tokens: SplitsTokens | None
) -> Boundary:
    """The boundary that is sent to the next stage.

    Args:
        tensors: the hidden state first.
        places: of each among the flattened arguments of the call; -1 for none of them.
        effects: what layers have left behind.
        tokens: what has split tokens, if anything has.
    """
    leaves, sent = [], []
    for place, tensor in zip(places, tensors, strict=True):
        rows, described = tensor, None
        if tokens is not None and isinstance(tensor, WholeTensor):
            rows, described = tokens.parted(tensor)
        leaves.append(Leaf(place, tuple(rows.shape), rows.dtype, rows.requires_grad, described, all_tokens_here()))
        sent.append(rows)
    return Boundary(tuple(leaves), sent, effects=effects)
