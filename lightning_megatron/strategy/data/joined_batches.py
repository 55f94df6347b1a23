"""Puts the batches of several replicas together, as one process has their samples in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.mesh.batches import map_rows


def joined_batches(one: Any, other: Any) -> Any:
    """The samples of two batches of one form at once: tensors, arrays and lists such as texts that are cut along them.

    Args:
        one: a batch; what of it is not cut along its samples stays.
        other: another.

    Returns:
        The batch; ``None`` where their samples differ in shape.

    Example:
        Tokens [1, 9] and [1, 9] give [2, 9]; [1, 9] and [1, 7] give nothing.
    """
    rows: list[Any] = []

    def join(mine: Any) -> Any:
        beside: Any = rows.pop(0) if rows else None
        if type(mine) is not type(beside):
            raise ValueError  # caught below: such batches are not joined
        if isinstance(mine, Tensor):
            return torch.cat((mine, beside))
        if isinstance(mine, (list, tuple)):
            return type(mine)((*mine, *beside))
        import numpy

        return numpy.concatenate((mine, beside))

    try:
        map_rows(other, lambda each: rows.append(each) or each)  # type: ignore[func-returns-value]
        both = map_rows(one, join)
    except (ValueError, TypeError, RuntimeError):
        return None
    return None if rows else both


def in_order(batch: Any, order: Sequence[int]) -> Any:
    """The samples of a batch in another order.

    Args:
        batch: the user's.
        order: their places, of as many as there are.
    """

    def taken(rows: Any) -> Any:
        return type(rows)(rows[at] for at in order) if isinstance(rows, (list, tuple)) else rows[list(order)]

    return map_rows(batch, taken)
