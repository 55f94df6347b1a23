"""The user's options for gradients and weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_megatron.data_parallel.buckets.holders import OptimizerSharding
from lightning_megatron.data_parallel.offload_request import Offload
from lightning_megatron.data_parallel.windows.sharded_weights import ShardedWeights


@dataclass(frozen=True)
class GradientOptions:
    """How gradients are summed and weights kept.

    Attributes:
        sharding: how replicas share the optimizer's work.
        bucket_bytes: size of a bucket.
        layer_dtype: 16-bit dtype in which layers hold most weights, with float32 ones for the optimizer; ``None``
            for one set of weights.
        reduce_dtype: dtype in which sums over replicas travel; ``None`` for that of the main gradients.
        inspect: whether to note which gradients are not finite before they are summed.
        overlap_gather: whether updated weights travel while the next step begins.
        experts: replicas over which experts are distributed.
        offload: where the optimizer's weights and state lie in host memory; ``None`` for on the device.
        weights: how replicas share the weights of layers too, each of which is whole while it runs; ``None`` for not.
    """

    sharding: OptimizerSharding = True
    bucket_bytes: int = 25 * 1024 * 1024
    layer_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    inspect: bool = False
    overlap_gather: bool = False
    experts: int = 1
    weights: ShardedWeights | None = None
    offload: Offload | None = None

    @property
    def weights_arrive(self) -> bool:
        """Whether weights are gathered while a step runs."""
        return self.overlap_gather or self.weights is not None
