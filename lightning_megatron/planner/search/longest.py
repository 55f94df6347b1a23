"""The longest sequence that a layout can train."""

from __future__ import annotations

from dataclasses import replace

from lightning_megatron.planner.model.cluster import Cluster
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape
from lightning_megatron.planner.search.savings import chunks_of_loss, fits

_LONGEST = 1 << 28


def longest_sequence(shape: ModelShape, recipe: Recipe, cluster: Cluster, headroom: float = 0.0) -> int:
    """The largest number of tokens that fits: a multiple of the number of context ranks.

    Args:
        shape: the model; its ``seq`` does not matter.
        recipe: the layout. With ``loss_chunks`` or ``mlp_chunks`` above 1 their number grows with the sequence.
        cluster: the machine.
        headroom: share of memory to leave free.

    Raises:
        ValueError: not even one token per context rank fits.
    """
    low, high = 0, _LONGEST // recipe.context
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(shape, recipe, cluster, headroom, middle * recipe.context):
            low = middle
        else:
            high = middle
    if not low:
        raise ValueError(f"`{recipe.describe()}` does not fit on {cluster.gpu.name} with any sequence; use more ranks")
    return low * recipe.context


def _fits(shape: ModelShape, recipe: Recipe, cluster: Cluster, headroom: float, seq: int) -> bool:
    longer = replace(shape, seq=seq)
    if recipe.loss_chunks > 1:
        recipe = replace(recipe, loss_chunks=max(2, chunks_of_loss(longer, recipe)))
    if recipe.mlp_chunks > 1:  # as many tokens in a piece as the model is wide
        recipe = replace(recipe, mlp_chunks=max(2, seq // recipe.context // shape.hidden))
    return fits(longer, recipe, cluster, headroom)
