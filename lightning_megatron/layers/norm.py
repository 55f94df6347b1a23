"""Norms of sequence-sharded activations.

A norm acts on one token at a time, so it runs unchanged on a sequence shard. The gradients of its weights, however, are
partial sums over the tokens of the rank. The table that `shard_` returns says so.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.layers.table import ShardTable, replicated_table


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` for activations split along the sequence. x: [.., seq / group, hidden] -> same shape."""

    def shard_(self, mesh: DeviceMesh | dist.ProcessGroup, *, sequence_parallel: bool = True) -> ShardTable:
        """Table of the (whole) parameters, whose gradients are to be summed over the group."""
        return replicated_table(self, sums_gradient=sequence_parallel)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` for activations split along the sequence. x: [.., seq / group, hidden] -> same shape."""

    def shard_(self, mesh: DeviceMesh | dist.ProcessGroup, *, sequence_parallel: bool = True) -> ShardTable:
        """Table of the (whole) parameters, whose gradients are to be summed over the group."""
        return replicated_table(self, sums_gradient=sequence_parallel)
