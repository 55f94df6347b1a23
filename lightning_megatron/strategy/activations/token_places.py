"""Where the tokens are in the tensors that a layer saves: learnt by running it once more on some of them.

A saved tensor has the tokens as a dim, or in one that they were flattened into: [batch * tokens, features] or [tokens *
batch, features]. The same tensor of a run on ``m`` of ``n`` tokens has a dim that is shorter by as much, and in it the
same numbers, to rounding: a layer for which that is not so is not token by token, and is refused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_ROUNDING_OF_16_BITS = 5e-2


class Place(NamedTuple):
    """The dim with the tokens.

    Attributes:
        dim: of the saved tensor.
        inner: whether what the tokens were flattened with lies behind them.
    """

    dim: int
    inner: bool = False

    def rows(self, tensor: Tensor, tokens: int, first: int, count: int) -> Tensor:
        """A view of ``count`` of the ``tokens``: the dim becomes two, of the tokens and what is with them."""
        more = tensor.shape[self.dim] // tokens
        if self.inner:
            return tensor.unflatten(self.dim, (tokens, more)).narrow(self.dim, first, count)
        return tensor.unflatten(self.dim, (more, tokens)).narrow(self.dim + 1, first, count)

    def fill(self, target: Tensor, tokens: int, first: int, part: Tensor) -> None:
        """Write the ``first`` tokens and those behind them; ``part`` is a saved tensor of these alone."""
        count = part.shape[self.dim] * tokens // target.shape[self.dim]
        self.rows(target, tokens, first, count).copy_(self.rows(part, count, 0, count))


def place_in(saved: Tensor, part: Tensor, tokens: int, count: int, inner: bool) -> Place | None:
    """Where the tokens are.

    Args:
        saved: by a run on all of ``tokens``.
        part: the same tensor of a run on the last ``count`` of them.
        tokens: that there are.
        count: those that were run.
        inner: whether to suppose that the tokens lie in front of what they were flattened with.

    Returns:
        The place, or ``None`` for a tensor without tokens.

    Raises:
        ValueError: the numbers are others; what is wrong, in words.
    """
    shape = f"a tensor of shape {tuple(saved.shape)} is"
    if saved.shape == part.shape:
        return None
    other = [dim for dim in range(saved.ndim) if saved.ndim == part.ndim and saved.shape[dim] != part.shape[dim]]
    if len(other) != 1 or saved.shape[other[0]] * count != part.shape[other[0]] * tokens or saved.dtype != part.dtype:
        raise ValueError(f"{shape} {tuple(part.shape)} for {count} of {tokens} tokens")
    for place in (Place(other[0], inner), Place(other[0], not inner)):
        if _alike(place.rows(saved, tokens, tokens - count, count), place.rows(part, count, 0, count)):
            return place
    raise ValueError(f"{shape} made of other numbers when the last {count} tokens are computed without the others")


def _alike(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    size = torch.nan_to_num(one, 0.0, 0.0, 0.0).abs().amax() if one.numel() else one.new_zeros(())
    close = _ROUNDING.get(one.dtype, _ROUNDING_OF_16_BITS)
    return torch.allclose(one, other, rtol=close, atol=close * float(size), equal_nan=True)
