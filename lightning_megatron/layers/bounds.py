"""Indices outside of what is split over ranks: no rank has such an entry, so each would take it for another's.

Torch refuses them where the whole table is: on the CPU by an error, on CUDA by an assertion in the kernel, which waits
for nothing. Layers that are split do the same, as otherwise zeros would come out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_bounds(index: Tensor, length: int, what: str, kept: Tensor | None = None) -> None:
    """Refuse indices outside of ``[0, length)``.

    Args:
        index: [..], whole on every rank.
        length: of what they point into.
        what: they are, in messages: ``"{what} 7 is outside of 5 entries"``.
        kept: [..], which of them count; ``None`` for all.

    Raises:
        IndexError: on the CPU. On CUDA the assertion fails on the device, as that of ``F.embedding`` does.
    """
    if not index.numel() or index.device.type not in ("cpu", "cuda"):
        return
    wrong = (index < 0) | (index >= length)
    wrong = wrong if kept is None else wrong & kept
    if index.device.type == "cuda":
        assert_none(wrong, f"{what} is outside of {length} entries")
    elif bool(wrong.any()):
        raise IndexError(f"{what} {int(index[wrong][0])} is outside of {length} entries")


def assert_none(wrong: Tensor, message: str) -> None:
    """Fail on the device of ``wrong``, without waiting for it, where any of it is true."""
    torch._assert_async(~wrong.any(), message)
