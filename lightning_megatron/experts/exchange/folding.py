"""Rows that all tensor ranks of a replica have, shared out among them before they are sent to experts.

Between the layers that are split over tensor ranks each of them has all tokens. Each sends some of them only, and gets
the others' results from its neighbours. They take turns, as rows may be sorted by expert. Two tensor ranks, five rows::

    rows on both      0 1 2 3 4
    tensor rank 0     0 2 4        ─▶ experts ─▶   0 2 4   ┐
    tensor rank 1     1 3          ─▶ experts ─▶   1 3     ┴─▶ 0 1 2 3 4 on both

=================  ==============  ==============
function           forward         backward
=================  ==============  ==============
``Folding.own``    own rows        all-gather
``Folding.whole``  all-gather      own rows
=================  ==============  ==============
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

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of ``x``, equal on all ranks: [n, ..] -> [n/t, ..]."""
        group = self._group
        if group is None or not len(x):
            return x
        rank, size = group.rank(), group.size()
        if not x.requires_grad:
            return x[rank::size]
        turns = -(-len(x) // size)
        rows = split_to_group(_padded(x, turns * size).unflatten(0, (turns, size)), 1, group)
        return rows.flatten(0, 1)[: -(-(len(x) - rank) // size)]

    def whole(self, x: Tensor, rows: int) -> Tensor:
        """All rows, of which each rank has its own: [n/t, ..] -> [n, ..], where n is ``rows``."""
        group = self._group
        if group is None or not rows:
            return x
        turns = _padded(x, -(-rows // group.size())).unsqueeze(1)
        return gather_from_group(turns, 1, group).flatten(0, 1)[:rows]


def _padded(x: Tensor, rows: int) -> Tensor:
    """``x`` with rows of zeros after it."""
    return x if len(x) == rows else F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - len(x)))
