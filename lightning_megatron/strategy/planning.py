"""The planner's answers, applied to a run that is about to start: which layout, and which process is which rank.

Both are settled before the processes connect, by every process for itself from the same facts: the module's shape,
counted without memory, the batch that its loader gives, the number of processes, and the machine.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_megatron.mesh.layout import Layout, resolve_layout
from lightning_megatron.planner import Cluster, Gpu, Limits, ModelShape, Prediction, Recipe, plan
from lightning_megatron.planner.model.cluster import GB
from lightning_megatron.planner.search.search import Plan
from lightning_megatron.planner.topology import (
    RankPlacement,
    Sizes,
    Topology,
    assign,
    rank_numbers,
    stage_speeds,
    step_volumes,
)
from lightning_megatron.strategy.callbacks.expert_bias import counts_rows
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of, trainer_of, training_data
from lightning_megatron.strategy.memory.whole_shape import counted
from lightning_megatron.strategy.options.balance_asked import Balance
from lightning_megatron.strategy.options.context_checks import check_context_run
from lightning_megatron.strategy.options.expert_checks import check_expert_run
from lightning_megatron.strategy.options.left_to_planner import FACTS
from lightning_megatron.strategy.options.options import Options
from lightning_megatron.strategy.options.recipes import recipe_of_run
from lightning_megatron.strategy.options.together import check_activations_run
from lightning_megatron.strategy.options.weight_checks import check_sharded_weights
from lightning_megatron.strategy.tried_layout import refused_choice

_PRECISIONS = {"32": "fp32", "64": "fp64", "bf": "bf16", "16": "fp16", "fp8": "fp8"}


def recipe_of(found: Plan | Prediction | Recipe) -> Recipe:
    """The recipe in whatever the planner returned.

    Raises:
        ValueError: something else.
    """
    prediction = found.best if isinstance(found, Plan) else found
    recipe = prediction.recipe if isinstance(prediction, Prediction) else prediction
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"`from_plan({found!r})` needs what the planner returned: `plan(...)`, one of its predictions, or a Recipe."
        )
    return recipe


@dataclass(frozen=True)
class Settled:
    """Options of a run once nothing is left to the planner.

    Attributes:
        options: of the run, with sizes and schedule.
        plan: what the planner found; ``None`` where the layout was given.
        numbers: rank of every process, by the order of the launch; ``None`` where the two are the same.
        stage_speeds: relative speed of every stage's devices; ``None`` where they do not differ.
    """

    options: Options
    plan: Plan | None = None
    numbers: list[int] | None = None
    stage_speeds: tuple[float, ...] | None = None


def settle(options: Options, module: pl.LightningModule, world: int, per_node: int, device: torch.device) -> Settled:
    """Answer what the options leave to the planner: the layout, and which process is which rank.

    Args:
        options: as the user gave them.
        module: the user's module, attached to its Trainer.
        world: processes.
        per_node: processes on a node.
        device: this process's device.

    Raises:
        ValueError: a fact cannot be detected, or no layout fits; the message says what to give or change.
    """
    found = None
    if options.layout == "auto":
        with torch.random.fork_rng(devices=[]):
            found = _choose(options, module, world, per_node, device)
        options = options.with_recipe(found.best.recipe)
        rank_zero_info(f"layout='auto': {found.best.recipe.describe()}\n{found.explanation}")
    if options.topology is None:
        return Settled(options, found)
    layout = resolve_layout(world, **options.sizes)
    return Settled(options, found, *_number(options, options.topology, module, layout))


def _choose(options: Options, module: pl.LightningModule, world: int, per_node: int, device: torch.device) -> Plan:
    """The planner's best layout for a run, within ``layout_options`` and what goes together with other options."""
    asked = options.layout_options or {}
    shape, batch = facts(module, asked)
    cluster = asked.get("cluster") or detected_cluster(device, per_node)
    given = {name: value for name, value in asked.items() if name not in FACTS}
    precision = precision_of(module)
    usual = Limits(precision=precision, shardings=shardings_of(options), offload=device.type != "cpu")
    given |= {"expert": options.expert_parallel_size} if options.expert_parallel_size > 1 else {}
    limits = replace(usual, **(limits_of(options, module, usual) | given))
    whole, cluster = _built(module), replace(cluster, gpus_per_node=per_node)
    while True:
        found = plan(shape, cluster, world, replica_batch=batch, limits=limits)
        refused = refused_choice(options, whole, found.best.recipe)
        if refused is None:
            return found
        if refused.name in given:
            raise refused.error
        rank_zero_info(f"layout='auto': not {refused.called}: {refused.error}")
        limits = replace(limits, **{refused.name: refused.without})


def shardings_of(options: Options) -> tuple[str, ...]:
    """The shardings over replicas to try; an optimizer that is not sharded, or in a way of its own, stays so."""
    if options.optimizer_sharding is False:
        return ("none",)
    return ("zero1", "fsdp") if isinstance(options.optimizer_sharding, Mapping) else ("zero1", "none", "fsdp")


def limits_of(options: Options, module: pl.LightningModule, usual: Limits) -> dict[str, Any]:
    """Limits of a search for what cannot be combined with other options or the module, as their own checks say."""
    whole = tuple(name for name in usual.shardings if name != "fsdp")
    limits: dict[str, dict[str, Any]] = {
        "expert_parallel_size": {"expert": 1},
        "context_parallel_size": {"context": 1},
        "sequence_parallel": {"sequence_parallel": False},
        "loss_chunks": {"loss_chunks": False},
        "weight_sharding": {"shardings": whole},
        "optimizer_offload": {"offload": False},
        "activation_offload": {"offload": False},
    }
    found: dict[str, Any] = {}
    for name, limit in limits.items():
        if not _goes_together(options, module, name):
            found |= limit
    return found


def _goes_together(options: Options, module: pl.LightningModule, name: str) -> bool:
    """Whether an option that the planner may choose goes together with the others, and with the module."""
    values: dict[str, Any] = {"weight_sharding": True, "optimizer_offload": True, "activation_offload": "all"}
    changed: dict[str, Any] = {name: values.get(name, 2)}
    if name == "sequence_parallel":
        changed = {name: True, "tensor_parallel_size": 2}
    trainer = trainer_of(module)
    try:
        replace(options, layout=None, layout_options=None, **changed)
        if trainer is None:
            return True
        if name == "sequence_parallel":
            asked = options.log_expert_load or Balance.asked(options.expert_balance).rate is not None
            return not (asked or counts_rows(callbacks_of(trainer)))
        if name == "expert_parallel_size":
            check_expert_run(2, 1, trainer, module)
        elif name == "context_parallel_size":
            check_context_run(2, str(trainer.precision), module)
        elif name == "weight_sharding":
            check_sharded_weights(True, module, Layout(data=2), options.pipeline_layers)
        elif name == "activation_offload":
            check_activations_run("all", str(trainer.precision), module)
    except (ValueError, MisconfigurationException):
        return False
    return True


def _number(
    options: Options, topology: Topology | RankPlacement, module: pl.LightningModule, layout: Layout
) -> tuple[list[int], tuple[float, ...] | None]:
    """Rank of every process, and the speed of every stage where processes differ.

    Args:
        options: their ``layout_options`` tell facts that cannot be detected.
        topology: the machine's islands, or a placement on them.
        module: the user's module.
        layout: the grid.
    """
    if isinstance(topology, RankPlacement):
        return rank_numbers(topology, layout), None
    shape, batch = facts(module, options.layout_options or {})
    recipe = recipe_of_run(options, layout, batch, precision_of(module))
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
    seq = options.get("seq") or sample_length(loader)
    if seq is None:
        raise ValueError(
            "the sequence length cannot be read from the first sample of the training loader; give "
            "`layout_options={'seq': tokens}`."
        )
    return counted_shape(module, seq, options.get("heads")), batch


def counted_shape(module: pl.LightningModule, seq: int, heads: int | None = None) -> ModelShape:
    """Shape of a module, also of one that is built in ``configure_model``: then a copy is built on the meta device."""
    return counted(_built(module), seq=seq, heads=heads)


def _built(module: pl.LightningModule) -> pl.LightningModule:
    """The module, or a copy on the meta device where its layers are built in ``configure_model`` only."""
    if not is_overridden("configure_model", module):
        return module
    with suppress(ValueError):
        counted(module, seq=1)
        return module
    trainer = trainer_of(module)
    built = copy.deepcopy(module, {id(trainer): trainer} if trainer is not None else None)
    with torch.device("meta"):
        built.configure_model()
    return built


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
    given = training_data(module)
    if isinstance(given, pl.LightningDataModule):
        return None  # it is set up later
    if given is None or isinstance(given, pl.LightningModule):
        return module.train_dataloader() if is_overridden("train_dataloader", module) else None
    return given


def sample_length(loader: Any) -> int | None:
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


def precision_of(module: pl.LightningModule) -> str:
    """The planner's name for the Trainer's precision."""
    trainer = trainer_of(module)
    text = str(trainer.precision) if trainer is not None else "32-true"
    return next((name for start, name in _PRECISIONS.items() if text.startswith(start)), "fp32")
