"""Random numbers of a key and an index, computed anywhere in any order.

A generator gives its numbers one after the other; which one an element gets depends on all that were drawn before. Here
the number of element ``i`` of a draw is a hash of the draw's key and ``i`` (splitmix64: Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014): a rank that needs elements 40 to 79 computes just those.
Integer arithmetic is exact and wraps around alike on every device; only logarithms and cosines are a device's own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31
_OTHER = 0x5851F42D4C957F2D
_CACHED = 1 << 15  # elements that stay in a core's cache from one operation to the next
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _signed(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


def _shift_(piece: Tensor, by: int, scratch: Tensor) -> None:
    """``piece ^= piece >> by`` without sign."""
    torch.bitwise_right_shift(piece, by, out=scratch)
    scratch.bitwise_and_((1 << (64 - by)) - 1)
    piece.bitwise_xor_(scratch)


def hashed_(indices: Tensor, key: int) -> Tensor:
    """Hash global indices, in place.

    Args:
        indices: of the elements, int64, contiguous.
        key: of the draw.

    Returns:
        The same tensor: 64 random bits for each.
    """
    flat = indices.view(-1)
    pieces = flat.split(_CACHED) if flat.device.type == "cpu" else (flat,)
    scratch = torch.empty_like(pieces[0])
    for piece in pieces:
        spare = scratch[: piece.numel()]
        piece.mul_(_signed(_STEP)).add_(_signed(key))
        for by, factor in _ROUNDS:
            _shift_(piece, by, spare)
            piece.mul_(_signed(factor))
        _shift_(piece, _LAST, spare)
    return indices


def below(indices: Tensor, key: int, share: float) -> Tensor:
    """True with probability ``share``, for each index; takes the indices."""
    words = hashed_(indices, key)
    if share >= 1.0:
        return torch.ones_like(words, dtype=torch.bool)
    return words < _signed(int(share * 2.0**64) - (1 << 63))


def uniform(indices: Tensor, key: int, dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1) with all digits that the type has, for each index; takes the indices."""
    bits = _BITS.get(dtype, 24)
    words = hashed_(indices, key).bitwise_right_shift_(64 - bits).bitwise_and_((1 << bits) - 1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return words.to(wide).mul_(2.0**-bits).to(dtype if dtype.is_floating_point else wide)


def normal(indices: Tensor, key: int, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers (Box and Muller, 1958), for each index; takes the indices."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angle = uniform(indices.clone(), key ^ _OTHER, wide).mul_(2 * math.pi).cos_()
    radius = uniform(indices, key, wide).neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
    return radius.mul_(angle).to(dtype)


def exponential(indices: Tensor, key: int, dtype: torch.dtype) -> Tensor:
    """Exponential numbers of rate 1, never 0, for each index; takes the indices."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = uniform(indices, key, wide).neg_().add_(1.0).log_().neg_()
    return numbers.clamp_(min=torch.finfo(wide).tiny).to(dtype)


def integers(indices: Tensor, key: int, low: int, high: int) -> Tensor:
    """Integers of at least ``low`` and less than ``high``, for each index; takes the indices."""
    words = hashed_(indices, key).bitwise_and_((1 << 63) - 1)
    return words.remainder_(high - low).add_(low)
