"""Batches with whole numbers that point at their own samples: the edges of a graph are pairs of its nodes.

Such a batch cannot be cut along its samples, as numbers that are not cut with them would point beyond a part::

    x            [9 nodes, features]    cut: nodes 0-1, 2-3, ...
    edge_index   [2, 30], up to 8       goes whole to every part, where node 8 is not
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_megatron.mesh.batches import batch_size_of, even_tensors


class PointingBatches:
    """Tells batches that stay whole for what they hold.

    Attributes:
        may_come: whether a replica may have such batches, so that all of them ask each other.
    """

    def __init__(self) -> None:
        self.may_come, self._said = False, False

    def includes(self, batch: Any, part: int) -> bool:
        """Whether numbers of a batch point beyond a part of it; said once.

        Args:
            batch: the user's.
            part: samples of a part.
        """
        size = batch_size_of(batch)
        if not self.may_come or part >= size:
            return False
        found = [tensor for tensor in _beside(batch, size) if part <= int(tensor.max()) < size and not _counts(tensor)]
        if found and not self._said:
            self._said = True
            rank_zero_info(
                f"a batch of {size} samples (as long as its first tensor) has whole numbers of shape "
                f"{tuple(found[0].shape)} up to {int(found[0].max())} that may point at samples, as the edges of a "
                "graph do: such batches run whole. Graphs that are padded to one size, with a dense adjacency, run in "
                "micro-batches."
            )
        return bool(found)


def has_numbers_beside(batch: Any) -> bool:
    """Whether a batch holds whole numbers that are not cut with its samples.

    Args:
        batch: the user's; what a step gets that fetches its own batches holds none.
    """
    return any(tensor.ndim for tensor in even_tensors(batch)) and bool(_beside(batch, batch_size_of(batch)))


def _beside(batch: Any, size: int) -> list[Tensor]:
    """Tensors of whole numbers that are not cut."""
    tensors = [tensor for tensor in even_tensors(batch) if tensor.ndim and len(tensor) != size and tensor.numel()]
    whole = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return [tensor for tensor in tensors if tensor.dtype in whole]


def _counts(tensor: Tensor) -> bool:
    """Whether it is 0, 1, 2, ...: positions of tokens, for example."""
    return tensor.ndim == 1 and torch.equal(tensor, torch.arange(len(tensor)).to(tensor))
