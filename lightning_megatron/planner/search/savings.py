"""Memory savings that a layout may use, in the order of their cost: the first that fits is taken."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from lightning_megatron.planner.cost.memory import logits, peak_memory, recompute_share
from lightning_megatron.planner.model.cluster import MIB, Cluster
from lightning_megatron.planner.model.recipe import VEE_SCHEDULES, Recipe
from lightning_megatron.planner.model.shape import ModelShape

_PIECE = 64 * MIB


def cheapest_fitting(
    shape: ModelShape,
    recipe: Recipe,
    cluster: Cluster,
    headroom: float = 0.0,
    *,
    offload: bool = False,
    loss_chunks: bool = False,
) -> Recipe | None:
    """The recipe with the least recomputation and offload that fits; None if none does.

    Args:
        shape: the model.
        recipe: with any recomputation.
        cluster: the machine.
        headroom: share of memory to leave free.
        offload: whether activations and the optimizer may lie in host memory.
        loss_chunks: whether logits may be computed in pieces.
    """
    pieces = chunks_of_loss(shape, recipe) if loss_chunks else 1
    tries = variants(recipe, offload, pieces)
    return next((tried for tried in tries if fits(shape, tried, cluster, headroom)), None)


def chunks_of_loss(shape: ModelShape, recipe: Recipe) -> int:
    """Pieces of logits of at most 64 MiB each, as ``loss_chunks="auto"`` makes them; 1 where none can be made."""
    if recipe.shards_weights and not recipe.software.chunks_sharded_head:
        return 1
    return max(1, math.ceil(4.0 * logits(shape, recipe) / _PIECE))


def variants(recipe: Recipe, offload: bool, pieces: int = 1) -> Iterator[Recipe]:
    """The recipe as it is kept whole, then with more and more given up, each also with logits in pieces.

    Full recomputation comes after activations in host memory, which cost nothing once sequences are long, and the
    optimizer in host memory last: its update waits for the processor.
    """
    plain = replace(recipe, recompute="none", activation_offload=None, optimizer_offload=0.0, loss_chunks=1)
    full = replace(plain, recompute="full")
    tries = [plain, full]
    if offload:
        away = replace(plain, activation_offload=_share_away(recipe))
        tries[1:1] = [away] if recipe.software.fused_attention else []
        inputs = replace(full, activation_offload="inputs") if recipe.software.offloads_inputs else away
        tries += [inputs] if inputs != away else []
        tries.append(replace(full, optimizer_offload=1.0))
        tries += [replace(inputs, optimizer_offload=1.0)] if inputs != away or recipe.software.fused_attention else []
    for tried in tries:
        yield tried
        if pieces > 1:
            yield replace(tried, loss_chunks=pieces)


def _share_away(recipe: Recipe) -> float | str:
    """Share of the tokens whose activations leave: all of them where the others' could not be computed again."""
    split = recipe.schedule.startswith("zb") or recipe.schedule in VEE_SCHEDULES
    sequence = recipe.sequence_parallel and recipe.tensor > 1
    return 1.0 if (split or sequence) and not recipe.software.splits_repeated_tokens else "auto"


def fits(shape: ModelShape, recipe: Recipe, cluster: Cluster, headroom: float = 0.0) -> bool:
    """Whether the fullest rank fits into its GPU, and into its share of the host's memory."""
    memory = peak_memory(shape, recipe, cluster, recompute_share(shape, recipe, cluster))
    return memory.total <= (1.0 - headroom) * cluster.gpu.memory and memory.host <= cluster.host_share(recipe.world)
