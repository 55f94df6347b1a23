"""Learns where the tokens are in the tensors that a layer saves, by running it once more on some of them.

A saved tensor has the tokens as a dim, or in one that they were flattened into: [batch * tokens, features] or [tokens *
batch, features]. The same tensor of a run on ``m`` of ``n`` tokens has a dim that is shorter by as much, and in it the
same numbers, to rounding: a layer for which that is not so is not token by token, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_ROUNDING_OF_16_BITS = 5e-2


class TokenPlace(NamedTuple):
    """The dim with the tokens.

    Attributes:
        dim: of the saved tensor.
        inner: whether what the tokens were flattened with lies after them.
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
        """Write the ``first`` tokens and those after them; ``part`` is a saved tensor of these alone."""
        count = part.shape[self.dim] * tokens // target.shape[self.dim]
        for dim, size in enumerate(target.shape):
            part = part.narrow(dim, 0, size) if size == 1 else part  # see `unrepeated`
        self.rows(target, tokens, first, count).copy_(self.rows(part, count, 0, count))


def place_in(saved: Tensor, part: Tensor, tokens: int, count: int, inner: bool) -> TokenPlace | None:
    """The place of the tokens in a saved tensor.

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
    for place in (TokenPlace(other[0], inner), TokenPlace(other[0], not inner)):
        if _alike(place.rows(saved, tokens, tokens - count, count), place.rows(part, count, 0, count)):
            return place
    raise ValueError(f"{shape} made of other numbers when the last {count} tokens are computed without the others")


def _alike(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    size = torch.nan_to_num(one, 0.0, 0.0, 0.0).abs().amax() if one.numel() else one.new_zeros(())
    close = _ROUNDING.get(one.dtype, _ROUNDING_OF_16_BITS)
    return torch.allclose(one, other, rtol=close, atol=close * float(size), equal_nan=True)


def is_flat(tensor: Tensor, operand: Tensor) -> bool:
    """Whether a product saved an operand with its matrices in one dim: [.., n, d] -> [matrices, n, d]."""
    same = tensor.ndim == 3 < operand.ndim and tensor.shape[-2:] == operand.shape[-2:]
    return same and tensor.numel() == operand.numel() and tensor.stride()[-2:] == operand.stride()[-2:]


def flat_as(rows: Tensor, size: Sequence[int]) -> Tensor:
    """Rows of an operand with as many dims as the saved tensor has."""
    return rows if rows.ndim == len(size) else rows.flatten(0, rows.ndim - len(size))


def empty_like(dtype: torch.dtype, size: Any, stride: Any, device: torch.device) -> Tensor:
    """A tensor whose dims lie in memory in the order of those strides."""
    order = sorted(range(len(size)), key=lambda dim: (-stride[dim], dim))
    return torch.empty_permuted(size, order, dtype=dtype, device=device)


def dense(rows: Tensor) -> Tensor:
    """A copy without gaps, so that functions take the ways that they take with all tokens; it may be written into."""
    return empty_like(rows.dtype, rows.shape, rows.stride(), rows.device).copy_(rows)


def unrepeated(tensor: Tensor, tokens: int) -> Tensor:
    """A view without the repeats of expanded dims: keys that heads share, say; ``tokens`` is a dim that stays.

    Kernels ask for the strides with which they have run: a copy that made heads of the repeats would have others.
    """
    for dim in range(tensor.ndim):
        if dim != tokens and tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
