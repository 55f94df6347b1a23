"""Weights sharded over replicas (ZeRO-3): what of them is whole when, and what gathers and sums move.

For P weights of e bytes on a rank's stage, d shards, m micro-batches, and layers of u weights:

| free  | sum         | weights in a step | gradients | gathers of a layer | sums of a layer |
|-------|-------------|-------------------|-----------|--------------------|-----------------|
| layer | micro_batch | shard + 2 e u     | 4 P/d     | 2 m                | m               |
| layer | step        | shard + 2 e u     | g P       | 2 m                | 1               |
| step  | micro_batch | shard + e P       | 4 P/d     | 1                  | m               |
| step  | step        | shard + e P       | 4 P       | 1                  | 1               |

Embedding and head are whole where they are. Where sums follow each micro-batch, the gradients of two layers are whole
at a time: 2 g u more. Without a pipeline PyTorch's FSDP is the first row; under one it is the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.planner.cost.communication import Group, all_reduce_seconds, gather_seconds
from lightning_megatron.planner.cost.stages import StageSeconds, hidden_cost
from lightning_megatron.planner.model.cluster import Cluster
from lightning_megatron.planner.model.constants import Constants
from lightning_megatron.planner.model.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Case:
    """When sharded weights are whole.

    Attributes:
        frees_layers: a layer's weights are freed after it has run; otherwise all stay whole for the step.
        sums_micro_batches: gradients are cut into shards after every micro-batch; otherwise once a step.
    """

    frees_layers: bool
    sums_micro_batches: bool


def case_of(recipe: Recipe) -> Case:
    """The row of the table above that applies to a recipe; what it leaves open follows from the software."""
    piped, software = recipe.pipeline > 1, recipe.software
    free, sums = not piped or software.frees_under_pipeline, not piped and software.sums_shards
    return Case(
        free if recipe.free == "auto" else recipe.free == "layer",
        sums if recipe.gradient_sum == "auto" else recipe.gradient_sum == "micro_batch",
    )


def shards(recipe: Recipe, gpus_per_node: int) -> int:
    """Number of shards of weights or of the optimizer's state."""
    if recipe.shard is not None or recipe.sharding != "hsdp":
        return recipe.shard or recipe.replicas
    most = min(recipe.replicas, max(1, gpus_per_node // recipe.tensor))
    return max(size for size in range(1, most + 1) if recipe.replicas % size == 0)


@dataclass(frozen=True, slots=True)
class Units:
    """Parameters on one rank of a stage.

    Attributes:
        all: all of them.
        layer: those of the largest layer.
        matrix: those of its largest matrix.
        vocabulary: those of an embedding or head, if the stage has one.
    """

    all: float
    layer: float
    matrix: float
    vocabulary: float


def sharded_state(recipe: Recipe, units: Units, gpus_per_node: int) -> tuple[float, float, float]:
    """Bytes of (weights, gradients, optimizer state) on one rank, with what is gathered at the fullest moment.

    PyTorch's FSDP keeps one shard of the weights, in 32 bits, and gathers 16-bit layers, the next one ahead. Software
    with a single adapter gathers one parameter at a time.
    """
    count, parts, case = units.all, shards(recipe, gpus_per_node), case_of(recipe)
    element, stored = float(recipe.element), max(4.0, float(recipe.element))
    shard, moments = stored * count / parts, 2.0 * stored * count / parts
    if recipe.software.keeps_16_bit_shard and recipe.mixed:
        shard, moments = element * count / parts, moments + shard
    if case.frees_layers:
        open_now = units.matrix if recipe.software.single_adapter else 2.0 * units.layer
        gathered = element * (open_now + units.vocabulary)
    else:
        gathered = element * count
    if case.sums_micro_batches:
        gradients = stored * count / parts
    elif recipe.software.frees_gradients and recipe.pipeline * recipe.micro_batches == 1:
        gradients = recipe.bytes_per_gradient * count / parts
    elif recipe.software.sums_shards:  # the shards of sums are beside them when a step ends
        gradients = stored * count + stored * count / parts
    else:
        gradients = float(recipe.bytes_per_gradient) * count
    if recipe.weight_offload:
        return gathered, 0.0, moments
    return shard + gathered, gradients, moments


def passing_gradients(recipe: Recipe, units: Units) -> float:
    """Bytes of the gradients that are whole beside their shards: two layers', where sums follow each micro-batch.

    Software that gathers one parameter at a time sums as few at a time.
    """
    if recipe.software.single_adapter or (not recipe.weight_offload and not case_of(recipe).sums_micro_batches):
        return 0.0
    return 2.0 * recipe.bytes_per_gradient * units.layer


@dataclass(frozen=True, slots=True)
class Volume:
    """Bytes that one rank receives in a step.

    Attributes:
        gathered: of weights.
        summed: of gradients.
    """

    gathered: float
    summed: float


def step_volume(recipe: Recipe, parameters: float, gpus_per_node: int) -> Volume:
    """Bytes that a rank with ``parameters`` of sharded weights receives in a step.

    ``layer`` gathers 2 m e P (d-1)/d and ``step`` e P (d-1)/d; sums are 4 P (d-1)/d, m times or once.
    """
    parts, case = shards(recipe, gpus_per_node), case_of(recipe)
    once = parameters * (parts - 1) / parts
    gathers = 2.0 * recipe.micro_batches if case.frees_layers else 1.0
    sums = recipe.micro_batches if case.sums_micro_batches else 1.0
    return Volume(gathers * recipe.element * once, sums * recipe.bytes_per_gradient * once)


def sharded_seconds(
    recipe: Recipe, cluster: Cluster, constants: Constants, stage: StageSeconds, parameters: float, layers: float
) -> float:
    """Exposed seconds of the gathers and sums of one step.

    Args:
        recipe, cluster, constants: layout, machine and calibrated constants.
        stage: compute of the slowest rank for one micro-batch, under which they hide.
        parameters: on the rank.
        layers: on the rank.
    """
    group = Group(shards(recipe, cluster.gpus_per_node), recipe.tensor, 1 if recipe.software.single_adapter else None)
    gather = gather_seconds(recipe.element * parameters, group, cluster, constants, pieces=layers)
    scatter = gather_seconds(recipe.bytes_per_gradient * parameters, group, cluster, constants, pieces=layers)
    case, count = case_of(recipe), recipe.micro_batches
    window = 1.0 - 1.0 / (layers + 1.0)
    forward, backward = window * stage.forward, window * (stage.input_gradient + stage.weight_gradient)
    summing = scatter if case.sums_micro_batches else 0.0
    if case.frees_layers and recipe.software.prefetches_weights:
        each = hidden_cost(gather, forward, constants) + hidden_cost(gather + summing, backward, constants)
    elif case.frees_layers:  # a layer waits for its weights
        each = 2.0 * gather + hidden_cost(summing, backward, constants)
    else:
        each = hidden_cost(summing, backward, constants)
    total = count * each
    if not case.frees_layers:
        total += hidden_cost(gather, forward, constants)
    if not case.sums_micro_batches:
        total += hidden_cost(scatter, backward, constants)
    if recipe.weight_offload:  # a shard comes for every gather, and its gradient leaves
        moved = (2.0 if case.frees_layers else 1.0) * recipe.element + recipe.bytes_per_gradient
        copy = moved * parameters / group.size / cluster.host_bandwidth
        total += count * max(0.0, copy - forward - backward)
    if recipe.replicas > group.size:
        copies = Group(recipe.replicas // group.size, cluster.gpus_per_node)
        whole = all_reduce_seconds(2.0 * parameters / group.size, copies, cluster, constants)
        total += hidden_cost(whole, backward, constants)
    return total
