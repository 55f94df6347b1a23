"""The planner's answers, applied to a run that is about to start: which layout, and which process is which rank.

Both are settled before the processes connect, by every process for itself from the same facts: the module's shape,
counted without memory, the batch that its loader gives, the number of processes, and the machine.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_megatron.mesh.layout import Layout
from lightning_megatron.planner import Cluster, Gpu, Limits, ModelShape, Prediction, Recipe, plan
from lightning_megatron.planner.model.cluster import GB
from lightning_megatron.planner.model.module_shape import shape_from_module
from lightning_megatron.planner.search.search import Plan
from lightning_megatron.planner.topology import (
    Placement,
    Sizes,
    assign,
    rank_numbers,
    stage_speeds,
    step_volumes,
)
from lightning_megatron.strategy.layout_request import FACTS, Choice

_PRECISIONS = {"32": "fp32", "64": "fp64", "bf": "bf16", "16": "fp16", "fp8": "fp8"}


def strategy_arguments(recipe: Recipe) -> dict[str, Any]:
    """Arguments of ``MegatronStrategy`` that run ``recipe``.

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


def recipe_of(found: Plan | Prediction | Recipe) -> Recipe:
    """The recipe in whatever the planner returned."""
    prediction = found.best if isinstance(found, Plan) else found
    return prediction.recipe if isinstance(prediction, Prediction) else prediction


def choose(choice: Choice, module: pl.LightningModule, world: int, per_node: int, device: torch.device) -> Plan:
    """Plan the layout of a run.

    Args:
        choice: what was asked.
        module: the user's module, attached to its Trainer.
        world: processes.
        per_node: processes on a node.
        device: this process's device.

    Raises:
        ValueError: a fact cannot be detected, or no layout fits; the message says what to give or change.
    """
    shape, batch = facts(module, choice.options)
    cluster = choice.options.get("cluster") or detected_cluster(device, per_node)
    given = {name: value for name, value in choice.options.items() if name not in FACTS}
    limits = replace(Limits(precision=_precision(module)), **given)
    return plan(shape, replace(cluster, gpus_per_node=per_node), world, replica_batch=batch, limits=limits)


def numbering(
    choice: Choice, module: pl.LightningModule, recipe: Recipe, layout: Layout
) -> tuple[list[int], tuple[float, ...] | None]:
    """Rank of every process, and the speed of every stage where processes differ.

    Args:
        choice: with a topology or a placement.
        module: the user's module.
        recipe: the layout that is run; its batch is filled in from the loader.
        layout: the grid.
    """
    topology = choice.topology
    if isinstance(topology, Placement):
        return rank_numbers(topology, layout), None
    assert topology is not None
    shape, batch = facts(module, choice.options)
    size = min(recipe.micro_batch, batch)
    recipe = replace(recipe, micro_batch=size, global_batch=batch * recipe.data, precision=_precision(module))
    sizes = Sizes(layout.pipeline, layout.data, layout.tensor)
    placed = assign(topology, sizes, step_volumes(shape, recipe), anchored=True)
    numbers = rank_numbers(placed, layout)
    return numbers, stage_speeds(topology, numbers, layout)


def facts(module: pl.LightningModule, options: Mapping[str, Any]) -> tuple[ModelShape, int]:
    """The module's shape, and the batch that one replica's loader gives.

    Raises:
        ValueError: one of them cannot be detected; the message names the option.
    """
    loader = _loader(module)
    batch = options.get("batch_size") or getattr(loader, "batch_size", None)
    if not isinstance(batch, int):
        raise ValueError(
            "the batch size cannot be read from the training loader; give "
            "`layout_options={'batch_size': samples per replica}`."
        )
    if (shape := options.get("shape")) is not None:
        return shape, batch
    seq = options.get("seq") or _sample_length(loader)
    if seq is None:
        raise ValueError(
            "the sequence length cannot be read from the first sample of the training loader; give "
            "`layout_options={'seq': tokens}`."
        )
    return counted_shape(module, seq, options.get("heads")), batch


def counted_shape(module: pl.LightningModule, seq: int, heads: int | None = None) -> ModelShape:
    """Shape of a module, also of one that is built in ``configure_model``: then a copy is built on the meta device."""
    try:
        return shape_from_module(module, seq=seq, heads=heads)
    except ValueError:
        if not is_overridden("configure_model", module):
            raise
    trainer = module._trainer
    built = copy.deepcopy(module, {id(trainer): trainer} if trainer is not None else None)
    with torch.device("meta"):
        built.configure_model()
    return shape_from_module(built, seq=seq, heads=heads)


def detected_cluster(device: torch.device, per_node: int) -> Cluster:
    """The cluster of a process's device: NVIDIA's usual one around a known GPU, or a rough one of CPU processes.

    Raises:
        ValueError: the GPU is not in the table.
    """
    if device.type == "cuda":
        return Cluster.named(torch.cuda.get_device_name(device))
    cores = max(1.0, (os.cpu_count() or 1) / per_node)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_node
    # A core does some tens of GFLOP/s in 32 bits; processes of one machine talk through its memory.
    cpu = Gpu("CPU", "ampere", cores * 100e9, 0.0, memory, cores * 10 * GB, 1)
    return Cluster(cpu, per_node, nvlink=2 * GB, network=1 * GB, nvlink_latency=2e-4, network_latency=5e-4)


def _loader(module: pl.LightningModule) -> Any:
    """The training loader, where it was given to ``fit`` or the module makes it."""
    trainer = module._trainer
    source = getattr(trainer.fit_loop, "_data_source", None) if trainer is not None else None
    given = getattr(source, "instance", None)
    if isinstance(given, pl.LightningDataModule):
        return None  # it is set up later
    if given is None or isinstance(given, pl.LightningModule):
        return module.train_dataloader() if is_overridden("train_dataloader", module) else None
    return given


def _sample_length(loader: Any) -> int | None:
    """Tokens in the first sample of a loader's dataset."""
    dataset = getattr(loader, "dataset", None)
    try:
        sample = dataset[0]  # type: ignore[index]
    except (TypeError, KeyError, IndexError, NotImplementedError):
        return None
    return _length(sample)


def _length(value: Any) -> int | None:
    """Length of the first row of whole numbers in a sample."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() == 1 and not value.is_floating_point() else None
    if isinstance(value, Mapping):
        return next((found for item in value.values() if (found := _length(item)) is not None), None)
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(item, int) for item in value):
            return len(value)
        return next((found for item in value if (found := _length(item)) is not None), None)
    return None


def _precision(module: pl.LightningModule) -> str:
    """The planner's name for the Trainer's precision."""
    trainer = module._trainer
    text = str(trainer.precision) if trainer is not None else "32-true"
    return next((name for start, name in _PRECISIONS.items() if text.startswith(start)), "fp32")
