"""Arguments of the strategy that run a recipe of the planner, and back; and the tensor-parallel plan in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_megatron.data_parallel.windows.sharded_weights import sharded_weights_of
from lightning_megatron.planner.model.recipe import CONTEXT_METHODS, SCHEDULES, Recipe
from lightning_megatron.strategy.activations.host_request import host_request

if TYPE_CHECKING:
    from lightning_megatron.parallelize import ParallelReport


def arguments_of(recipe: Recipe) -> dict[str, Any]:
    """Options that run a recipe of the planner; the batch and the precision are the loader's and the Trainer's.

    Raises:
        ValueError: the strategy does not do what the recipe says; the message names it, and what comes nearest.
    """
    if (wrong := _not_there(recipe)) is not None:
        raise ValueError(f"`{recipe.describe()}` cannot be run by MegatronStrategy: {wrong}.")
    arguments: dict[str, Any] = {
        "pipeline_parallel_size": recipe.pipeline,
        "data_parallel_size": recipe.data,
        "tensor_parallel_size": recipe.tensor,
        "sequence_parallel": recipe.sequence_parallel and recipe.tensor > 1,
        "micro_batch_size": recipe.micro_batch,
        "activation_recompute": None if recipe.recompute == "none" else recipe.recompute,
        **_sharding_arguments(recipe),
    }
    if recipe.context > 1:
        arguments["context_parallel_size"] = recipe.context
        method = recipe.context_method if recipe.rings == 1 else (recipe.context_method, recipe.heads_over)
        arguments["context_parallel_options"] = {"method": method}
    if recipe.loss_chunks > 1:
        arguments["loss_chunks"] = recipe.loss_chunks
    if recipe.mlp_chunks > 1:
        arguments["mlp_chunks"] = recipe.mlp_chunks
    if recipe.expert > 1:
        arguments["expert_parallel_size"] = recipe.expert
    if recipe.optimizer_offload:
        arguments["optimizer_offload"] = {"keep": 1.0 - recipe.optimizer_offload}
    if recipe.activation_offload is not None:
        given = recipe.activation_offload
        named: dict[Any, str] = {1: "all", "auto": "auto"}
        arguments["activation_offload"] = named.get(given, {"tokens": given})
    if recipe.pipeline > 1:
        arguments["pipeline_schedule"] = recipe.schedule
    if recipe.pipeline > 1 and recipe.schedule == "interleaved":
        arguments["virtual_pipeline_parallel_size"] = recipe.chunks
    return arguments


def _not_there(recipe: Recipe) -> str | None:
    """A setting of the recipe that the strategy lacks, with the nearest one; ``None`` where it has all."""
    if recipe.sharding == "zero2":
        return "`sharding='zero2'` is its `sharding='fsdp', gradient_sum='micro_batch'`, which shards weights too"
    if recipe.sharding == "hsdp" and recipe.shard is None:
        return (
            "`sharding='hsdp'` shares inside of a node; say over how many replicas with `shard`, or give a prediction"
        )
    if recipe.recompute == "auto":
        return "`recompute='auto'` is for runs whose recomputation is not known; use 'none', 'selective' or 'full'"
    if recipe.activation_offload == "inputs":
        return "`activation_offload='inputs'` is not implemented; use `activation_offload=0.0, recompute='none'`"
    if recipe.weight_offload:
        return "`weight_offload=True` is not implemented for training; `optimizer_offload=1.0` is"
    given = recipe.gradient_bytes
    kept = {"fp64": 8}.get(recipe.precision, 4)
    if given not in (None, kept):
        return f"`gradient_bytes={given}`, while gradients of {recipe.precision} add up in {kept} bytes; leave it out"
    return None


def _sharding_arguments(recipe: Recipe) -> dict[str, Any]:
    """How the replicas share weights and the optimizer's work."""
    shard = {} if recipe.shard in (None, recipe.replicas) else {"shard": recipe.shard}
    if recipe.sharding == "none" or recipe.shard == 1:
        return {"optimizer_sharding": False, "weight_sharding": False}
    if not recipe.shards_weights:
        return {"optimizer_sharding": shard or True, "weight_sharding": False}
    said = {"free": recipe.free, "sum": recipe.gradient_sum}
    asked = shard | {name: value for name, value in said.items() if value != "auto"}
    return {"optimizer_sharding": True, "weight_sharding": asked or True}


def recipe_of_run(options: Any, layout: Any, batch: int, precision: str) -> Recipe:
    """The options of a run as a recipe of the planner: :func:`arguments_of` the other way round.

    Args:
        options: of the strategy.
        layout: the grid.
        batch: samples that a replica's loader gives.
        precision: the planner's name for it.
    """
    engine, schedule = options.engine(), options.pipeline_schedule
    size, piped, offload = options.micro_batch_size, layout.pipeline > 1, engine.gradients.offload
    known = piped and schedule in SCHEDULES
    asked, heads = (options.context_parallel_options or {}).get("method"), None
    if isinstance(asked, list | tuple):
        asked, heads = asked
    return Recipe(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        data=layout.data,
        context=layout.context,
        micro_batch=min(size, batch) if isinstance(size, int) else max(1, batch // (layout.pipeline if piped else 1)),
        global_batch=batch * layout.data,
        chunks=engine.schedule_shape.chunks if known else 1,
        schedule=schedule if known else "1f1b",
        **_sharding_of(options, layout.data * layout.context),
        recompute=options.activation_recompute if options.activation_recompute in ("full", "selective") else "none",
        sequence_parallel=options.sequence_parallel,
        precision=precision,
        optimizer_offload=0.0 if offload is None else 1 - offload.keep,
        activation_offload=_activations_away(options.activation_offload),
        expert=options.expert_parallel_size,
        context_method=asked if asked in CONTEXT_METHODS else "gather",
        context_heads=heads,
        loss_chunks=options.loss_chunks if isinstance(options.loss_chunks, int) else 1,
        mlp_chunks=_pieces(options.mlp_chunks),
    )


def _pieces(asked: Any) -> int:
    """Pieces in which MLPs run: the fewest, where their names are given with a number each."""
    found = min(asked.values(), default=1) if isinstance(asked, Mapping) else asked
    return found if isinstance(found, int) else 1


def _sharding_of(options: Any, replicas: int) -> dict[str, Any]:
    """How the options share weights and the optimizer's work, in the planner's words."""
    asked, optimizer = sharded_weights_of(options.weight_sharding), options.optimizer_sharding
    if asked is not None:
        shard = asked.shard if asked.shard != replicas else None
        return {"sharding": "fsdp", "shard": shard, "free": asked.free, "gradient_sum": asked.sums}
    shard = optimizer.get("shard") if isinstance(optimizer, Mapping) else None
    if not optimizer or shard == 1:
        return {"sharding": "none"}
    return {"sharding": "zero1", "shard": shard if shard != replicas else None}


def _activations_away(value: Any) -> float | str | None:
    """Share of the tokens whose activations are kept in host memory, where all layers keep them there."""
    request = host_request(value)
    if request is None or request.patterns is not None or request.every != 1:
        return None
    return "auto" if request.tokens is None else request.tokens


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
