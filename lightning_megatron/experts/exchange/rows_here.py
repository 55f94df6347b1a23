"""Rows of tokens that context ranks split: each rank sends experts those that it has.

Between the layers of a step hidden states keep their global shape, and a rank holds its tokens' rows. What has been
gathered before it comes to experts is whole on every context rank; each then sends all of it, and its gradient is that
of this rank's loss only, whose sum over the ranks is the gradient of one process.
"""

from __future__ import annotations

from torch import Tensor

from lightning_megatron.layers.whole import WholeTensor


def rows_here(given: Tensor) -> Tensor:
    """The rows of a tensor that are on this rank, as an ordinary one: [.., tokens, h] -> [.., tokens here, h]."""
    if not isinstance(given, WholeTensor):
        return given
    return given.held() if given.is_by_rows else given.full()


def rows_of(model: Tensor, other: Tensor) -> Tensor:
    """The same rows of another tensor, with the same dims of tokens."""
    if not (isinstance(model, WholeTensor) and model.is_by_rows):
        return other.full() if isinstance(other, WholeTensor) else other
    if isinstance(other, WholeTensor):
        if other.spread == model.spread and other.along == model.along:
            return other.held()
        other = other.full()
    return model.part_of(other)


def shown_as(model: Tensor, rows: Tensor) -> Tensor:
    """A tensor of global shape again, whose rows here are those that :func:`rows_here` gave for ``model``."""
    if not (isinstance(model, WholeTensor) and model.is_by_rows):
        return rows
    return model.from_held(rows)
