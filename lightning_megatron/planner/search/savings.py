"""What a layout may give up for memory, in the order of what it costs: the first that fits is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_megatron.planner.cost.memory import peak_memory, recompute_share
from lightning_megatron.planner.model.cluster import Cluster
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape


def cheapest_fitting(
    shape: ModelShape, recipe: Recipe, cluster: Cluster, headroom: float = 0.0, *, offload: bool = False
) -> Recipe | None:
    """The recipe with the least recomputation and offload that fits; None if none does.

    Args:
        shape: the model.
        recipe: with any recomputation.
        cluster: the machine.
        headroom: share of memory to leave free.
        offload: whether activations and the optimizer may lie in host memory.
    """
    return next((tried for tried in variants(recipe, offload) if fits(shape, tried, cluster, headroom)), None)


def variants(recipe: Recipe, offload: bool) -> Iterator[Recipe]:
    """The recipe as it is kept whole, then with more and more given up.

    Full recomputation comes after activations in host memory, which cost nothing once sequences are long, and the
    optimizer in host memory last: its update waits for the processor.
    """
    plain = replace(recipe, recompute="none", activation_offload=None, optimizer_offload=0.0)
    yield plain
    if offload and recipe.software.fused_attention:
        yield replace(plain, activation_offload="auto")
    full = replace(plain, recompute="full")
    yield full
    if not offload:
        return
    yield replace(full, activation_offload="inputs")
    yield replace(full, optimizer_offload=1.0)
    yield replace(full, activation_offload="inputs", optimizer_offload=1.0)


def fits(shape: ModelShape, recipe: Recipe, cluster: Cluster, headroom: float = 0.0) -> bool:
    """Whether the fullest rank fits into its GPU, and into its share of the host's memory."""
    memory = peak_memory(shape, recipe, cluster, recompute_share(shape, recipe, cluster))
    return memory.total <= (1.0 - headroom) * cluster.gpu.memory and memory.host <= cluster.host_share
