"""Logits that stay split over the vocabulary until an operation needs them whole.

A vocabulary-parallel head returns `VocabParallelLogits`: a tensor of the global shape that stores this rank's classes.
Pointwise arithmetic, views of tokens, ``softmax``, sums, products and ``torch.nn.functional.cross_entropy`` run on the
local classes. All other functions (argmax, sampling, metrics, indexing by class) first gather the whole logits, and
are differentiable through the gather. See `lightning_megatron.layers.whole`.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from lightning_megatron.layers.whole import RULES, SplitDim, WholeTensor


class VocabParallelLogits(WholeTensor):
    """A tensor of global shape [.., vocabulary, ..] that stores this rank's part of the classes."""

    rules = RULES

    @staticmethod
    def wrap(local: Tensor, group: dist.ProcessGroup, vocabulary: int, dim: int = -1) -> VocabParallelLogits:
        """Logits from this rank's part.

        Args:
            local: [.., padded vocabulary / group, ..], classes along ``dim``.
            group: the tensor group.
            vocabulary: number of real classes.
            dim: the dim of the classes.
        """
        return VocabParallelLogits.show(local, SplitDim(group, vocabulary), dim % local.ndim)
