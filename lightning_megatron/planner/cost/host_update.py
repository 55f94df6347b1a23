"""Optimizers whose weights and state lie in host memory: bytes there, and the time of an update.

The processor updates U parameters/s; a link moves B bytes/s each way. Every k-th bucket may come to the GPU for its
update with s bytes a parameter, while the processor updates k - 1 others, of which w bytes a parameter go back. Both
take equally long at k* = 1 + s / (B / U - w); the better of its two neighbours is taken (Deep Optimizer States, arXiv
2410.21316).
"""

from __future__ import annotations

import math

from lightning_megatron.planner.model.cluster import Cluster
from lightning_megatron.planner.model.recipe import Recipe

_MOST = 16
"""A stride above this saves no more than its buffers cost."""
_BUCKETS = 3.0
"""Buckets with state on the GPU at once: one comes, one is updated, one leaves."""


def state_per_parameter(recipe: Recipe) -> float:
    """Bytes of weights and state that an Adam update reads: 12 in 32 bits."""
    return 3.0 * max(4.0, float(recipe.element))


def interleaved_seconds(stride: int, update: float, bandwidth: float, state: float, weight: float) -> float:
    """Seconds per parameter if every ``stride``-th bucket is updated on the GPU, whose own updates take no time."""
    return max((stride - 1) / stride / update, (state + weight * (stride - 1)) / (stride * bandwidth))


def best_stride(update: float, bandwidth: float, state: float, weight: float) -> int | None:
    """Every how manieth bucket is best updated on the GPU; None for none, where the link is too slow.

    Args:
        update: parameters/s of the processor.
        bandwidth: bytes/s of the link in each direction.
        state: bytes of a parameter that travel for an update on the GPU.
        weight: bytes of a parameter that travel after an update on the processor.
    """
    spare = bandwidth / update - weight
    best = 1.0 + state / spare if spare > 0 else math.inf
    if best > _MOST:
        return None
    near = {max(1, math.floor(best)), math.ceil(best)}
    return min(near, key=lambda stride: interleaved_seconds(stride, update, bandwidth, state, weight))


def update_seconds(parameters: float, recipe: Recipe, cluster: Cluster) -> float:
    """Seconds to update the ``parameters`` of a rank in host memory, with their gradients' way there.

    Gradients leave before the update, and weights return during it.
    """
    update, bandwidth = cluster.host_update, cluster.host_bandwidth
    state, weight = state_per_parameter(recipe), float(recipe.element)
    stride = best_stride(update, bandwidth, state, weight)
    each = max(1.0 / update, weight / bandwidth)
    if stride is not None:
        each = min(each, interleaved_seconds(stride, update, bandwidth, state, weight))
    return parameters * (each + max(4.0, float(recipe.element)) / bandwidth)


def host_bytes(parameters: float, recipe: Recipe) -> float:
    """Bytes in host memory of a rank that updates ``parameters``: weights, state, and gradients, which leave early."""
    return (state_per_parameter(recipe) + max(4.0, float(recipe.element))) * recipe.optimizer_offload * parameters


def visiting_bytes(parameters: float, recipe: Recipe) -> float:
    """Bytes on the GPU of the buckets that come there for their update."""
    away = recipe.optimizer_offload * parameters
    return _BUCKETS * state_per_parameter(recipe) * min(recipe.software.bucket, away)
