"""Rows that all tensor ranks of a replica have, shared out among them before they are sent to experts.

Between the layers that are split over tensor ranks each of them has all tokens. Each sends a block of them only, and
gets the other blocks' results from its neighbours. Two tensor ranks, five rows::

    rows on both      0 1 2 3 4
    tensor rank 0     0 1 2        ─▶ experts ─▶   0 1 2   ┐
    tensor rank 1     3 4          ─▶ experts ─▶   3 4     ┴─▶ 0 1 2 3 4 on both

=================  =======================  =======================
function           forward                  backward
=================  =======================  =======================
``Folding.own``    own block of rows        all-gather
``Folding.whole``  all-gather               own block of rows
=================  =======================  =======================
"""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.mesh.messages.collectives import gather_from_group, split_to_group


class Folding:
    """Shares out rows among the ranks of a tensor group.

    Args:
        group: the tensor group; ``None`` where every rank has rows of its own, which it sends all by itself.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def __deepcopy__(self, memo: Any) -> Folding:
        """The same, in the same group."""
        return copy.copy(self)

    def _ends(self, rows: int) -> tuple[int, int, int]:
        """First and last row of this rank, and how many a block has: of 5 rows over 2 ranks (0, 3, 3), (3, 5, 3)."""
        assert self._group is not None
        block = -(-rows // self._group.size())
        first = min(self._group.rank() * block, rows)
        return first, min(first + block, rows), block

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of ``x``, equal on all ranks: [n, ..] -> [n/t, ..]."""
        if self._group is None or not len(x):
            return x
        first, stop, block = self._ends(len(x))
        if not x.requires_grad:
            return x[first:stop]
        return split_to_group(_padded(x, block * self._group.size()), 0, self._group)[: stop - first]

    def whole(self, x: Tensor, rows: int) -> Tensor:
        """All rows, of which each rank has its own: [n/t, ..] -> [n, ..], where n is ``rows``."""
        if self._group is None or not rows:
            return x
        return gather_from_group(_padded(x, self._ends(rows)[2]), 0, self._group)[:rows]


def _padded(x: Tensor, rows: int) -> Tensor:
    """``x`` with rows of zeros behind it."""
    return x if len(x) == rows else F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - len(x)))
