"""Comparison of the gradients of a batch with those of its parts, up to rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

_COMPARED = 1 << 16  # elements of a gradient
_SMALL = 0.03  # times the largest gradient: below it there is nothing but rounding


def some_of(gradient: Tensor) -> Tensor:
    """Numbers of a gradient by which it is compared: some of a large one, as three of these would take memory."""
    each = gradient.numel() // _COMPARED
    return gradient.reshape(-1)[:: each | 1].clone() if each else gradient.clone()


def differs(
    whole: Mapping[str, Tensor],
    parts: Sequence[Mapping[str, Tensor]],
    tolerance: float,
    shares: Sequence[float] = (1.0, 1.0),
) -> str:
    """The first parameter whose gradient of a batch is not the sum of shares of those of its parts."""
    norms = {name: float(gradient.double().norm()) for name, gradient in whole.items()}
    least = _SMALL * max(norms.values(), default=0.0)
    for name, gradient in whole.items():
        rest = gradient.double()
        for part, share in zip(parts, shares, strict=True):
            rest = rest - part[name].double() * share if name in part else rest
        if not float(rest.norm()) <= tolerance * max(norms[name], least):
            return name
    return ""
