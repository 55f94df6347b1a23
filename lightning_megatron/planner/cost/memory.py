"""Peak memory per rank of each stage: weights, gradients, optimizer state, activations and buffers.

``layer_memory`` counts what one layer keeps, ``sharded_state`` what is left of weights that replicas share out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_megatron.planner.cost.context_ranks import held_bytes
from lightning_megatron.planner.cost.host_activations import KEPT_LAYERS, held_on_host, repeated_share, settled
from lightning_megatron.planner.cost.host_update import host_bytes, visiting_bytes
from lightning_megatron.planner.cost.layer_memory import (
    checkpoint_bytes,
    layer_activation_bytes,
    passing_layer_bytes,
)
from lightning_megatron.planner.cost.mixture import (
    expert_parameters_here,
    mixture_activation_bytes,
    passing_experts_bytes,
)
from lightning_megatron.planner.cost.sharded_state import Units, passing_gradients, sharded_state, shards
from lightning_megatron.planner.cost.stage_layers import in_flight, layers_of_ranks, mixtures_of_ranks
from lightning_megatron.planner.model.cluster import GIB, Cluster
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape

RUNTIME = 3.0 * GIB
"""Bytes of CUDA context, library workspaces and communicator buffers per rank."""
_FRAGMENTATION = 0.03
"""Fragmentation of the allocator, as a share of the bytes of all tensors."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank at its peak.

    Args:
        weights, gradients, optimizer: persistent from step to step.
        activations: kept for the backward.
        buffers: the rest: copies of logits, activations of the layer being recomputed, communication buffers, the
            runtime and fragmentation.
        host: in the host's memory, which is no part of the total.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all kinds on the GPU."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def stage_parameters(shape: ModelShape, recipe: Recipe, stage: int) -> float:
    """Parameters on one rank of ``stage``: its slice of the matrices, and all replicated parameters."""
    repeated = shape.replicated_layer_parameters
    layer = (shape.layer_parameters - repeated) / recipe.tensor + repeated
    mixtures = mixtures_of_ranks(shape, recipe)[stage]
    count = (layers_of_ranks(shape, recipe)[stage] - mixtures) * layer
    if mixtures:
        beside = shape.mixture_parameters - shape.experts * shape.expert_parameters
        router = shape.experts * shape.hidden
        count += mixtures * ((beside - repeated - router) / recipe.tensor + repeated + router)
        count += expert_parameters(shape, recipe, stage)
    head = recipe.rank_of(recipe.virtual_stages - 1)
    if stage == 0:
        count += (vocabulary_rows(shape, recipe) + shape.positions) * shape.hidden
    if stage == head:
        count += shape.final_norm_parameters
        if head != 0 or not shape.tied:
            count += vocabulary_rows(shape, recipe) * shape.hidden
    return count


def expert_parameters(shape: ModelShape, recipe: Recipe, stage: int) -> float:
    """Parameters of experts on one rank of ``stage``, which are those of :func:`stage_parameters` too."""
    if not shape.experts:
        return 0.0
    return mixtures_of_ranks(shape, recipe)[stage] * expert_parameters_here(shape, recipe)


def state_bytes(shape: ModelShape, recipe: Recipe, stage: int, gpus_per_node: int) -> tuple[float, float, float]:
    """Bytes of (weights, gradients, optimizer state) on one rank of ``stage``.

    Adam takes 12 bytes per parameter with 32-bit master weights, and two elements without. ``zero1`` divides these by
    the replicas, ``zero2`` divides the gradients too. With sharding and 16-bit gradients the optimizer converts its
    shard of the gradients to 32 bits first (4 bytes more). For ``fsdp`` see :mod:`sharded_state`. State in host memory
    does not count.
    """
    weights, gradients, optimizer = _device_and_host_state(shape, recipe, stage, gpus_per_node)
    return weights, gradients, (1.0 - recipe.optimizer_offload) * optimizer


def _device_and_host_state(
    shape: ModelShape, recipe: Recipe, stage: int, gpus_per_node: int
) -> tuple[float, float, float]:
    """:func:`state_bytes`, wherever the optimizer's part lies."""
    if recipe.shards_weights:
        return sharded_state(recipe, _units(shape, recipe, stage), gpus_per_node)
    count = stage_parameters(shape, recipe, stage)
    kept = float(recipe.bytes_per_gradient)
    adam = 12.0 if recipe.mixed else 2.0 * recipe.element
    if recipe.mixed and not recipe.software.direct_gradients:
        adam += 4.0 if kept == 2.0 and recipe.sharding != "none" else 0.0
        kept += 2.0 if kept == 4.0 else 0.0
    freed = (
        recipe.software.frees_gradients and recipe.sharding == "zero1" and recipe.pipeline * recipe.micro_batches == 1
    )
    parts = shards(recipe, gpus_per_node)
    gradients = kept * count / (parts if recipe.sharding == "zero2" or freed else 1)
    if recipe.sharding == "none":
        return recipe.element * count, gradients, adam * count
    experts = expert_parameters(shape, recipe, stage)
    owned = count - experts - 0.5 * _tied_twice(shape, recipe, stage)
    shares = owned / parts + experts / expert_shards(recipe, gpus_per_node)
    return recipe.element * count, gradients, adam * shares


def expert_holders(recipe: Recipe) -> int:
    """Ranks that hold the same experts and share their optimizer's work; replicas, where experts are not shared out."""
    return recipe.expert_copies if recipe.expert > 1 else recipe.replicas


def expert_shards(recipe: Recipe, gpus_per_node: int) -> int:
    """How many ranks share out the state of an expert: as many of its holders as replicas share the rest's."""
    holders = expert_holders(recipe)
    return holders if recipe.shard is None else math.gcd(shards(recipe, gpus_per_node), holders)


def _tied_twice(shape: ModelShape, recipe: Recipe, stage: int) -> float:
    """Tied parameters on one rank of ``stage`` whose optimizer state is sharded over the first and the last stage."""
    head = recipe.rank_of(recipe.virtual_stages - 1)
    shared = shape.tied and recipe.software.tied_state_once and recipe.replicas > 1
    if not shared or head == 0 or stage not in (0, head):
        return 0.0
    return vocabulary_rows(shape, recipe) * shape.hidden


def vocabulary_rows(shape: ModelShape, recipe: Recipe) -> float:
    """Rows of the embedding on one tensor rank: its slice, padded to a multiple of 128."""
    return shape.vocab if recipe.tensor == 1 else 128.0 * math.ceil(shape.vocab / recipe.tensor / 128)


def _units(shape: ModelShape, recipe: Recipe, stage: int) -> Units:
    """Parameters that one rank of ``stage`` gathers at once, if weights are sharded."""
    head = recipe.rank_of(recipe.virtual_stages - 1)
    vocabulary = shape.embedding_parameters if stage == 0 else shape.vocab * shape.hidden if stage == head else 0
    matrix = shape.hidden * max(shape.inner, shape.qkv_width)
    return Units(
        stage_parameters(shape, recipe, stage),
        shape.layer_parameters / recipe.tensor,
        matrix / recipe.tensor,
        vocabulary / recipe.tensor,
    )


def waiting_bytes(shape: ModelShape, recipe: Recipe, stage: int, recompute_share: float) -> float:
    """Bytes kept for the backward on one rank of ``stage``, at the peak when a backward begins.

    Layers keep their activations, or only their inputs if they are recomputed. After the last layer the norm keeps its
    input and output, and the loss one copy of the logits. If transfers overlap with compute, each neighbour has one
    message under way and one receive posted ahead; besides, the boundaries just computed in both directions are kept.
    """
    flying = in_flight(recipe, stage)
    boundary = checkpoint_bytes(shape, recipe)
    kept = recompute_share * boundary + (1.0 - recompute_share) * layer_activation_bytes(shape, recipe)
    layers = layers_of_ranks(shape, recipe)[stage] * flying
    mixtures = mixtures_of_ranks(shape, recipe)[stage] * flying
    if recipe.activation_offload is not None:
        mixtures *= min(layers, KEPT_LAYERS) / max(layers, 1.0)
        layers = min(layers, KEPT_LAYERS)
    total = kept * layers
    if mixtures:
        more = mixture_activation_bytes(shape, recipe) - layer_activation_bytes(shape, recipe)
        total += (1.0 - recompute_share) * more * mixtures
    if stage == recipe.rank_of(recipe.virtual_stages - 1):
        alive = flying if recipe.schedule == "gpipe" else 1.0
        whole = logits(shape, recipe) / recipe.loss_chunks
        given = boundary
        if recipe.software.keeps_gathered and recipe.sequence_parallel:
            given *= recipe.tensor
        total += alive * (boundary + given + whole * (4.0 if recipe.mixed else recipe.element))
        if recipe.software.keeps_outputs and recipe.pipeline > 1:
            total += 2.0 * recipe.micro_batches * logits(shape, recipe) * recipe.element
    if recipe.pipeline > 1 and not recipe.software.scatter_gather:
        total += recipe.element * recipe.micro_batch * shape.seq / recipe.context * shape.hidden * flying
    if recipe.pipeline == 1 or not recipe.software.overlap_pipeline:
        return total
    neighbours = 1.0 if stage in (0, recipe.pipeline - 1) else 2.0
    return total + (2.0 * neighbours + 2.0) * boundary * min(recipe.chunks, 2)


def passing_bytes(shape: ModelShape, recipe: Recipe, stage: int, recompute_share: float) -> float:
    """Temporary bytes on one rank of ``stage`` within one backward: of a recomputed layer, or of the loss.

    The logits are freed before the first layer is recomputed, so only the larger of the two counts. One copy of the
    logits is counted in :func:`waiting_bytes`.
    """
    layer = passing_layer_bytes(shape, recipe) if recompute_share > 0 else 0.0
    if layer and mixtures_of_ranks(shape, recipe)[stage]:
        whole = mixture_activation_bytes(shape, recipe) + passing_experts_bytes(shape, recipe)
        layer = max(layer, whole)
    if repeated_share(recipe):
        layer = passing_layer_bytes(shape, recipe) - (1.0 - repeated_share(recipe)) * layer_activation_bytes(
            shape, recipe
        )
    layer += held_bytes(shape, recipe)
    if stage == 0 and recipe.software.whole_embedding and recipe.context > 1:
        layer = max(layer, 2.0 * recipe.element * recipe.micro_batch * shape.seq * shape.hidden)
    if stage != recipe.rank_of(recipe.virtual_stages - 1):
        return layer
    each = 3.0 * recipe.element
    if recipe.mixed:  # the logits, their 32-bit copy and its gradient
        each = 10.0 if recipe.software.fused_kernels else 12.0
    first = 4.0 if recipe.mixed else recipe.element
    piece = logits(shape, recipe) / recipe.loss_chunks
    summed = 4.0 * vocabulary_rows(shape, recipe) * shape.hidden if recipe.loss_chunks > 1 and recipe.mixed else 0.0
    return max(layer - first * piece, (each - first) * piece + summed)


def logits(shape: ModelShape, recipe: Recipe) -> float:
    """Number of logits of one micro-batch on one rank."""
    return recipe.micro_batch * shape.seq / recipe.context * vocabulary_rows(shape, recipe)


def stage_memory(shape: ModelShape, recipe: Recipe, cluster: Cluster, stage: int, recompute_share: float) -> Memory:
    """Peak bytes of one rank of ``stage``."""
    recipe = settled(shape, recipe, cluster, taken=host_taken(shape, recipe, cluster))
    weights, gradients, optimizer = state_bytes(shape, recipe, stage, cluster.gpus_per_node)
    activations = waiting_bytes(shape, recipe, stage, recompute_share)
    passing = passing_bytes(shape, recipe, stage, recompute_share)
    tensors = weights + gradients + optimizer + activations + passing
    count = stage_parameters(shape, recipe, stage)
    buckets = 0.0
    if recipe.replicas > 1:
        buckets = 2.0 * recipe.bytes_per_gradient * min(recipe.software.bucket, count)
        if recipe.shards_weights:
            buckets = max(buckets, passing_gradients(recipe, _units(shape, recipe, stage)))
    updated = updated_parameters(count, recipe, cluster, expert_parameters(shape, recipe, stage))
    if recipe.optimizer_offload:
        buckets += visiting_bytes(updated, recipe)
    host = host_bytes(updated, recipe) if recipe.optimizer_offload else 0.0
    host += held_on_host(shape, recipe, stage)
    if recipe.weight_offload:
        host += (recipe.element + recipe.bytes_per_gradient) * count / shards(recipe, cluster.gpus_per_node)
    buffers = RUNTIME + buckets + passing + _FRAGMENTATION * tensors
    return Memory(weights, gradients, optimizer, activations, buffers, host)


def host_taken(shape: ModelShape, recipe: Recipe, cluster: Cluster) -> float:
    """Most bytes of host memory per GPU that the optimizer of a stage takes."""
    if not recipe.optimizer_offload:
        return 0.0
    counts = [stage_parameters(shape, recipe, stage) for stage in range(recipe.pipeline)]
    return host_bytes(updated_parameters(max(counts), recipe, cluster), recipe)


def updated_parameters(count: float, recipe: Recipe, cluster: Cluster, experts: float = 0.0) -> float:
    """How many of the ``count`` parameters of its stage, ``experts`` of which are experts', a rank updates."""
    if recipe.sharding == "none":
        return count
    parts = shards(recipe, cluster.gpus_per_node)
    return (count - experts) / parts + experts / expert_shards(recipe, cluster.gpus_per_node)


def peak_memory(shape: ModelShape, recipe: Recipe, cluster: Cluster, recompute_share: float) -> Memory:
    """Peak bytes of the fullest rank, which is on the first, second or last stage."""
    stages = sorted({0, min(1, recipe.pipeline - 1), recipe.pipeline - 1})
    found = [stage_memory(shape, recipe, cluster, stage, recompute_share) for stage in stages]
    return max(found, key=lambda memory: memory.total)


def recompute_share(shape: ModelShape, recipe: Recipe, cluster: Cluster) -> float:
    """Share of the layers that are fully recomputed.

    It is 1 for ``full``, 0 for ``none`` and Megatron's ``selective``, and the smallest share that fits, in steps of
    0.05, for ``auto``. Block-wise ``selective`` recomputation of FSDP trainers counts as a share of at least half.
    """
    blocks = recipe.recompute == "selective" and recipe.software.block_recompute
    if recipe.recompute != "auto" and not blocks:
        return 1.0 if recipe.recompute == "full" else 0.0
    for percent in range(50 if blocks else 0, 100, 5):
        if peak_memory(shape, recipe, cluster, percent / 100).total <= cluster.gpu.memory:
            return percent / 100
    return 1.0
