"""Arguments of the strategy that run a recipe of the planner, and its tensor-parallel plan in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_megatron.planner.model.recipe import Recipe

if TYPE_CHECKING:
    from lightning_megatron.parallelize import ParallelReport


def arguments_of(recipe: Recipe) -> dict[str, Any]:
    """Options that run a recipe of the planner.

    Raises:
        ValueError: the strategy has no such sharding, context parallelism, recomputation or offload.
    """
    sharded = recipe.sharding == "fsdp"
    known = recipe.sharding in ("none", "zero1", "fsdp") and recipe.recompute != "auto"
    pieces = recipe.mlp_chunks == 1 and recipe.activation_offload is None and not recipe.weight_offload
    if not known or not pieces:
        raise ValueError(
            f"`{recipe.describe()}` cannot be run by MegatronStrategy: it has `sharding='none'`, 'zero1' or 'fsdp', "
            "`recompute` 'none', 'selective' or 'full', `mlp_chunks=1`, and `activation_offload=None`."
        )
    arguments: dict[str, Any] = {
        "pipeline_parallel_size": recipe.pipeline,
        "data_parallel_size": recipe.data,
        "tensor_parallel_size": recipe.tensor,
        "sequence_parallel": recipe.sequence_parallel and recipe.tensor > 1,
        "micro_batch_size": recipe.micro_batch,
        "activation_recompute": None if recipe.recompute == "none" else recipe.recompute,
        "optimizer_sharding": recipe.sharding != "none",
        "weight_sharding": sharded,
    }
    said = {"free": recipe.free, "sum": recipe.gradient_sum}
    if sharded and set(said.values()) != {"auto"}:
        arguments["weight_sharding"] = {name: value for name, value in said.items() if value != "auto"}
    if recipe.context > 1:
        arguments["context_parallel_size"] = recipe.context
        arguments["context_parallel_options"] = {"method": recipe.context_method}
    if recipe.loss_chunks > 1:
        arguments["loss_chunks"] = recipe.loss_chunks
    if recipe.expert > 1:
        arguments["expert_parallel_size"] = recipe.expert
    if recipe.optimizer_offload:
        arguments["optimizer_offload"] = {"keep": 1.0 - recipe.optimizer_offload}
    if recipe.pipeline > 1:
        arguments["pipeline_schedule"] = recipe.schedule
    if recipe.pipeline > 1 and recipe.schedule == "interleaved":
        arguments["virtual_pipeline_parallel_size"] = recipe.chunks
    return arguments


def explain_plan(options: Any, module: nn.Module | None, report: ParallelReport | None) -> str:
    """The tensor-parallel plan as a table.

    Args:
        options: how to split.
        module: whole, to see the plan that it would get.
        report: the plan of the module in training, shown where no module is given.

    Raises:
        RuntimeError: no module was given, and none has been split yet.
        ValueError: there is no plan for ``module``.
    """
    if module is not None:
        from lightning_megatron.parallelize import explain

        size, plan = options.tensor_parallel_size, options.tensor_parallel_plan
        return explain(module, size, plan, options.sequence_parallel).explain()
    if report is None:
        raise RuntimeError(
            "there is no plan yet: it is made when a Trainer starts with `tensor_parallel_size` above 1. Give a "
            "module, `strategy.explain(module)`, to see its plan now."
        )
    return report.explain()
