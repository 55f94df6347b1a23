"""Logits that stay split over the vocabulary until someone needs them whole.

A vocabulary-parallel head returns `VocabParallelLogits`: a tensor of the global shape that holds this rank's classes.
Pointwise arithmetic, views of tokens, ``softmax``, sums, products and ``torch.nn.functional.cross_entropy`` run on the
classes that are here; everything else (argmax, sampling, metrics, indexing by class) first gathers the whole logits,
gradients included. See `lightning_megatron.layers.whole`.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from lightning_megatron.layers.whole import RULES, SplitDim, WholeTensor


class VocabParallelLogits(WholeTensor):
    """A tensor of global shape [.., vocabulary, ..] of which this rank holds its part of the classes."""

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
