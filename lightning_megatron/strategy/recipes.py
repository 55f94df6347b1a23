"""Arguments of the strategy that run a recipe of the planner."""

from __future__ import annotations

from typing import Any

from lightning_megatron.planner.model.recipe import Recipe


def arguments_of(recipe: Recipe) -> dict[str, Any]:
    """Options that run a recipe of the planner.

    Raises:
        ValueError: the strategy has no such sharding, context parallelism or recomputation.
    """
    if recipe.context > 1 or recipe.sharding not in ("none", "zero1") or recipe.recompute == "auto":
        raise ValueError(
            f"`{recipe.describe()}` cannot be run by MegatronStrategy: it has `context=1`, `sharding='none'` or "
            "'zero1', and `recompute` 'none', 'selective' or 'full'."
        )
    arguments: dict[str, Any] = {
        "pipeline_parallel_size": recipe.pipeline,
        "data_parallel_size": recipe.data,
        "tensor_parallel_size": recipe.tensor,
        "sequence_parallel": recipe.sequence_parallel and recipe.tensor > 1,
        "micro_batch_size": recipe.micro_batch,
        "activation_recompute": None if recipe.recompute == "none" else recipe.recompute,
        "optimizer_sharding": recipe.sharding == "zero1",
    }
    if recipe.pipeline > 1:
        arguments["pipeline_schedule"] = recipe.schedule
    if recipe.pipeline > 1 and recipe.schedule == "interleaved":
        arguments["virtual_pipeline_parallel_size"] = recipe.chunks
    return arguments
