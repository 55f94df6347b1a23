"""Peak memory per rank of each stage: weights, gradients, optimizer state, activations and buffers.

Activations are counted tensor by tensor, as autograd keeps them for one layer, so gated MLPs, grouped heads, 8-bit
inputs and fused attention need no separate formulas. For f = 4h, 16 bits, dropout and unfused attention the count is
sbh (10 + 24/t + 5as/(ht)), as in Korthikanti et al. (arXiv 2205.05198, table 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_megatron.planner.cost.stages import layers_of_ranks
from lightning_megatron.planner.model.cluster import GIB, Cluster
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape

_RUNTIME = 3.0 * GIB
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
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """Sum of all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def layer_activation_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes that one layer keeps for the backward of one micro-batch, without full recomputation."""
    tokens = recipe.micro_batch * shape.seq / recipe.context
    split = recipe.tensor if recipe.sequence_parallel else 1
    element = float(recipe.element)
    product_input = 1.0 if recipe.precision == "fp8" else element
    width = shape.head_size * shape.heads
    hidden = 2.0 * element + 2.0 * product_input
    parallel = element * shape.qkv_width + product_input * width
    parallel += shape.inner * (element * (2 if shape.gated else 1) + product_input)
    if recipe.software.dropout:
        hidden += 2.0
    if shape.gated and recipe.software.keeps_intermediates:
        hidden += 8.0
        parallel += element * shape.inner
    if recipe.software.fused_attention:
        parallel += (element - product_input) * width + 4.0 * shape.heads
    elif recipe.recompute != "selective":
        parallel += (2.0 * element + 1.0) * shape.heads * shape.seq
    return tokens * (hidden * shape.hidden / split + parallel / recipe.tensor)


def checkpoint_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes of a layer's input, which is all that a fully recomputed layer keeps of one micro-batch."""
    split = recipe.tensor if recipe.sequence_parallel else 1
    return recipe.element * recipe.micro_batch * shape.seq / recipe.context * shape.hidden / split


def in_flight(recipe: Recipe, stage: int) -> float:
    """Largest number of micro-batches whose activations ``stage`` holds at once; a chunk counts as 1/v.

    The numbers are those of the schedules, with which the tests compare them. If m is below p, or not a multiple of p
    with interleaving, they are too large by at most one micro-batch.
    """
    stages, chunks, count = recipe.pipeline, recipe.chunks, recipe.micro_batches
    if stages == 1:
        return 1.0
    if recipe.schedule == "gpipe":
        return float(count)
    if recipe.schedule == "1f1b":
        return float(min(stages - stage, count))
    if recipe.schedule == "interleaved":
        ragged = chunks - 1 if count % stages else 0
        warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1 + ragged
        return min(warm_up / chunks, float(count))
    most = {"zb-h1": stages, "zb-h2": 2 * stages - 1, "zb-v": stages, "dualpipe-v": stages + 0.5}
    return float(min(most[recipe.schedule], count))


def stage_parameters(shape: ModelShape, recipe: Recipe, stage: int) -> float:
    """Parameters on one rank of ``stage``: its slice of the matrices, and all replicated parameters."""
    repeated = shape.replicated_layer_parameters
    layer = (shape.layer_parameters - repeated) / recipe.tensor + repeated
    count = layers_of_ranks(shape, recipe)[stage] * layer
    head = recipe.rank_of(recipe.virtual_stages - 1)
    if stage == 0:
        count += (vocabulary_rows(shape, recipe) + shape.positions) * shape.hidden
    if stage == head:
        count += shape.final_norm_parameters
        if head != 0 or not shape.tied:
            count += vocabulary_rows(shape, recipe) * shape.hidden
    return count


def state_bytes(shape: ModelShape, recipe: Recipe, stage: int, gpus_per_node: int) -> tuple[float, float, float]:
    """Bytes of (weights, gradients, optimizer state) on one rank of ``stage``.

    Adam takes 12 bytes per parameter with 32-bit master weights, and two elements without. ``zero1`` divides these by
    the replicas, ``zero2`` divides the gradients too. With sharding and 16-bit gradients the optimizer converts its
    shard of the gradients to 32 bits first (4 bytes more). ``fsdp`` keeps shards of 32-bit weights, gradients and two
    moments, and all-gathers 16-bit layers; with a pipeline the gathered weights and unsharded gradients stay until the
    last micro-batch.
    """
    count = stage_parameters(shape, recipe, stage)
    if recipe.sharding in ("fsdp", "hsdp"):
        return _sharded_state(shape, recipe, count, gpus_per_node)
    kept = float(recipe.bytes_per_gradient)
    adam = 12.0 if recipe.mixed else 2.0 * recipe.element
    if recipe.mixed and not recipe.software.direct_gradients:
        adam += 4.0 if kept == 2.0 and recipe.sharding != "none" else 0.0
        kept += 2.0 if kept == 4.0 else 0.0
    freed = (
        recipe.software.frees_gradients and recipe.sharding == "zero1" and recipe.pipeline * recipe.micro_batches == 1
    )
    gradients = kept * count / (recipe.replicas if recipe.sharding == "zero2" or freed else 1)
    if recipe.sharding == "none":
        return recipe.element * count, gradients, adam * count
    owned = count - 0.5 * _tied_twice(shape, recipe, stage)
    return recipe.element * count, gradients, adam * owned / recipe.replicas


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


def _sharded_state(shape: ModelShape, recipe: Recipe, count: float, gpus_per_node: int) -> tuple[float, float, float]:
    """:func:`state_bytes` for fully sharded weights, with the current layer and the prefetched one gathered."""
    parts = recipe.replicas
    if recipe.sharding == "hsdp":
        parts = min(parts, max(1, gpus_per_node // recipe.tensor))
    stored = max(4.0, float(recipe.element))
    ahead = 1.0 if recipe.software.single_adapter else 2.0
    gathered = recipe.element * (ahead * shape.layer_parameters + shape.embedding_parameters) / recipe.tensor
    if recipe.pipeline > 1:
        gathered = (recipe.element + stored) * count
    return stored * count / parts + gathered, stored * count / parts, 2.0 * stored * count / parts


def waiting_bytes(shape: ModelShape, recipe: Recipe, stage: int, recompute_share: float) -> float:
    """Bytes kept for the backward on one rank of ``stage``, at the peak when a backward begins.

    Layers keep their activations, or only their inputs if they are recomputed. After the last layer the norm keeps its
    input and output, and the loss one copy of the logits. If transfers overlap with compute, each neighbour has one
    message under way and one receive posted ahead; besides, the boundaries just computed in both directions are kept.
    """
    flying = in_flight(recipe, stage)
    boundary = checkpoint_bytes(shape, recipe)
    kept = recompute_share * boundary + (1.0 - recompute_share) * layer_activation_bytes(shape, recipe)
    total = layers_of_ranks(shape, recipe)[stage] * kept * flying
    if stage == recipe.rank_of(recipe.virtual_stages - 1):
        alive = flying if recipe.schedule == "gpipe" else 1.0
        total += alive * (2.0 * boundary + logits(shape, recipe) * (4.0 if recipe.mixed else recipe.element))
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
    layer = layer_activation_bytes(shape, recipe) if recompute_share > 0 else 0.0
    if stage != recipe.rank_of(recipe.virtual_stages - 1):
        return layer
    each = 3.0 * recipe.element
    if recipe.mixed:  # the logits, their 32-bit copy and its gradient
        each = 10.0 if recipe.software.fused_kernels else 12.0
    first = 4.0 if recipe.mixed else recipe.element
    return max(layer - first * logits(shape, recipe), (each - first) * logits(shape, recipe))


def logits(shape: ModelShape, recipe: Recipe) -> float:
    """Number of logits of one micro-batch on one rank."""
    return recipe.micro_batch * shape.seq / recipe.context * vocabulary_rows(shape, recipe)


def stage_memory(shape: ModelShape, recipe: Recipe, cluster: Cluster, stage: int, recompute_share: float) -> Memory:
    """Peak bytes of one rank of ``stage``."""
    weights, gradients, optimizer = state_bytes(shape, recipe, stage, cluster.gpus_per_node)
    activations = waiting_bytes(shape, recipe, stage, recompute_share)
    passing = passing_bytes(shape, recipe, stage, recompute_share)
    tensors = weights + gradients + optimizer + activations + passing
    buckets = 0.0
    if recipe.replicas > 1:
        buckets = 2.0 * recipe.bytes_per_gradient * min(recipe.software.bucket, stage_parameters(shape, recipe, stage))
    buffers = _RUNTIME + buckets + passing + _FRAGMENTATION * tensors
    return Memory(weights, gradients, optimizer, activations, buffers)


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
