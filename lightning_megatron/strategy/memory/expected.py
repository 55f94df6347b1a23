"""The memory that the planner expects a run to take, rank by rank, and what other options would save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron.planner import Cluster, Memory, ModelShape, Recipe
from lightning_megatron.planner.cost.memory import RUNTIME, recompute_share, stage_memory
from lightning_megatron.planner.search.savings import chunks_of_loss
from lightning_megatron.strategy.data.walk import batch_size_of
from lightning_megatron.strategy.memory.ledger import Bytes
from lightning_megatron.strategy.memory.whole_shape import shape_of
from lightning_megatron.strategy.options.options import Options
from lightning_megatron.strategy.options.recipes import recipe_of_run
from lightning_megatron.strategy.planning import detected_cluster, precision_of, sample_length


@dataclass(frozen=True)
class ExpectedRun:
    """A run in the planner's words.

    Attributes:
        shape: of the model.
        recipe: the layout.
        cluster: the machine.
        has_runtime: whether a device's own runtime takes memory.
    """

    shape: ModelShape
    recipe: Recipe
    cluster: Cluster
    has_runtime: bool = True

    def bytes_of(self, stage: int) -> Bytes:
        """Of a rank of a stage, at the fullest moment of a step."""
        share = recompute_share(self.shape, self.recipe, self.cluster)
        found: Memory = stage_memory(self.shape, self.recipe, self.cluster, stage, share)
        buffers = found.buffers - (0 if self.has_runtime else RUNTIME)
        return Bytes(found.weights, found.gradients, found.optimizer, found.activations, buffers, found.host)


def expected(trainer: pl.Trainer, module: pl.LightningModule) -> ExpectedRun | str:
    """The planner's view of a run, or why there is none.

    Args:
        trainer: with its loader.
        module: whole, or divided over ranks.
    """
    strategy: Any = trainer.strategy
    options, layout, loader = strategy.options, strategy.mesh.layout, trainer.train_dataloader
    batch, seq = batch_size_of(loader), sample_length(loader)
    if batch is None or seq is None:
        return "the sizes of a batch cannot be read from the loader"
    facts = options.layout_options or {}
    shape = facts.get("shape") or shape_of(module)
    if isinstance(shape, str):
        return shape
    try:
        cluster = facts.get("cluster") or detected_cluster(strategy.root_device, trainer.num_devices)
        recipe = recipe_of_run(options, layout, batch, precision_of(module))
        if options.loss_chunks == "auto":
            recipe = replace(recipe, loss_chunks=chunks_of_loss(replace(shape, seq=seq), recipe))
    except ValueError as error:
        return str(error).partition("\n")[0]
    return ExpectedRun(replace(shape, seq=seq), recipe, cluster, strategy.root_device.type == "cuda")


@dataclass(frozen=True)
class OptionSaving:
    """Memory that an option would save.

    Attributes:
        arguments: of the strategy, in words.
        bytes: on one rank.
    """

    arguments: str
    bytes: float


def savings(options: Options, found: ExpectedRun, stage: int, most: int = 3) -> list[OptionSaving]:
    """The options that would save most on a rank of a stage, by the planner's count.

    Args:
        options: of the run.
        found: the run.
        stage: of the rank.
        most: how many to name.
    """
    now = found.bytes_of(stage).total
    saved = [OptionSaving(_words(changes), now - left) for changes, left in _alternatives(options, found, stage)]
    return sorted((each for each in saved if each.bytes > 0.005 * now), key=lambda each: -each.bytes)[:most]


def _alternatives(options: Options, found: ExpectedRun, stage: int) -> list[tuple[dict[str, Any], float]]:
    """Arguments that could be changed one at a time, each with the bytes of a rank that has it."""
    recipe = found.recipe
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if recipe.micro_batch > 1:
        changes.append(({"micro_batch_size": 1}, {"micro_batch": 1}))
    for recompute in ("selective", "full"):
        if recipe.recompute == "none" or (recompute == "full" and recipe.recompute == "selective"):
            changes.append(({"activation_recompute": recompute}, {"recompute": recompute}))
    if recipe.replicas > 1 and recipe.sharding == "none":
        changes.append(({"optimizer_sharding": True}, {"sharding": "zero1"}))
    if recipe.replicas > 1 and recipe.sharding in ("none", "zero1"):
        changes.append(({"weight_sharding": True, "optimizer_sharding": True}, {"sharding": "fsdp"}))
    if options.loss_chunks is None and (pieces := chunks_of_loss(found.shape, recipe)) > 1:
        changes.append(({"loss_chunks": "auto"}, {"loss_chunks": pieces}))
    if recipe.activation_offload is None and recipe.recompute == "none":
        changes.append(({"activation_offload": "all"}, {"activation_offload": 1.0}))
    if not recipe.optimizer_offload:
        changes.append(({"optimizer_offload": True}, {"optimizer_offload": 1.0}))
    if recipe.data % 2 == 0:
        half = {"data": recipe.data // 2}
        if found.shape.heads % (2 * recipe.tensor) == 0:
            changes.append(({"tensor_parallel_size": 2 * recipe.tensor}, {"tensor": 2 * recipe.tensor, **half}))
        if found.shape.layers >= 2 * recipe.virtual_stages:
            changes.append(({"pipeline_parallel_size": 2 * recipe.pipeline}, {"pipeline": 2 * recipe.pipeline, **half}))
    left = []
    for arguments, changed in changes:
        if _goes_together(options, arguments) and (changed_recipe := _changed(recipe, changed)) is not None:
            other = replace(found, recipe=changed_recipe)
            last = recipe.pipeline > 1 and stage == recipe.pipeline - 1
            left.append((arguments, other.bytes_of(other.recipe.pipeline - 1 if last else stage).total))
    return left


def _goes_together(options: Options, arguments: Mapping[str, Any]) -> bool:
    try:
        replace(options, **arguments)
    except (ValueError, MisconfigurationException):
        return False
    return True


def _changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe | None:
    """The recipe with changes; ``None`` if they do not go with the rest of it."""
    try:
        return replace(recipe, **changes)
    except ValueError:
        return None


def _words(arguments: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in arguments.items() if (name, value) != ("optimizer_sharding", True)}
    return ", ".join(f"{name}={value!r}" for name, value in (shown or arguments).items())


def held_savings(options: Options, held: Bytes, replicas: int, most: int = 3) -> list[OptionSaving]:
    """The same where the planner knows no such model: from the bytes that a rank keeps from step to step.

    Args:
        options: of the run.
        held: by the rank.
        replicas: ranks that have the same weights.
        most: how many to name.
    """
    rest = 1 - 1 / replicas
    candidates: list[tuple[dict[str, Any], float]] = [({"optimizer_offload": True}, held.optimizer)]
    if options.pipeline_parallel_size == 1:
        candidates.append(({"pipeline_parallel_size": 2}, sum(astuple(held)[:3]) / 2))
    if replicas > 1 and not options.optimizer_sharding:
        candidates.append(({"optimizer_sharding": True}, held.optimizer * rest))
    if replicas > 1 and not options.weight_sharding:
        candidates.append(({"weight_sharding": True}, held.weights * rest))
    saved = [OptionSaving(_words(given), size) for given, size in candidates if _goes_together(options, given)]
    return sorted((each for each in saved if each.bytes > 0), key=lambda each: -each.bytes)[:most]
