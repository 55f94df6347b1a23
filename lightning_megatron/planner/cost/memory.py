"""Peak memory of every stage's ranks: weights, gradients, optimizer state, activations and buffers.

Activation bytes are counted tensor by tensor (what autograd keeps of one layer), so gated MLPs, grouped heads, 8-bit
inputs and fused attention need no formulas of their own. For f = 4h, 16-bit, dropout and unfused attention the count is
Korthikanti's sbh (10 + 24/t + 5as/(ht)) (arXiv 2205.05198, table 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_megatron.planner.cost.stages import layers_of_ranks
from lightning_megatron.planner.model.cluster import GIB, Cluster
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape

_RUNTIME = 3.0 * GIB
"""CUDA context, library workspaces and communicator buffers of one rank."""
_FRAGMENTATION = 0.03
"""Share of the tensors that the allocator adds in gaps."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank at its fullest moment.

    Args:
        weights, gradients, optimizer: what lives from step to step.
        activations: what waits for its backward.
        buffers: all else: copies of logits, the layer being recomputed, communication, the runtime, gaps.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """All kinds together."""
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
    """Bytes that a fully recomputed layer keeps: its input."""
    split = recipe.tensor if recipe.sequence_parallel else 1
    return recipe.element * recipe.micro_batch * shape.seq / recipe.context * shape.hidden / split


def in_flight(recipe: Recipe, stage: int) -> float:
    """Micro-batches, counted in whole stages, whose activations ``stage`` holds at its fullest moment.

    Counts of the schedules themselves, which the tests compare with; where m is below p, or not a multiple of it under
    interleaving, they are upper bounds by at most one micro-batch.
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
    """Parameters that one rank of ``stage`` holds: its share of matrices, and all of what tensor ranks repeat."""
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
    """Bytes of weights, gradients and optimizer state on one rank of ``stage``.

    Adam with 32-bit master weights takes 12 bytes per parameter, and twice the element without; ``zero1`` divides these
    by the replicas, ``zero2`` the gradients too. A shard behind 16-bit gradients converts them to 32 bits first (4
    more). ``fsdp`` keeps 32-bit weights, gradients and two moments, all divided, and gathers 16-bit layers; under a
    pipeline the gathered weights and whole gradients stay until the last micro-batch.
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
    """Parameters on one rank of ``stage`` that the other end of the pipeline has too, and that share their state."""
    head = recipe.rank_of(recipe.virtual_stages - 1)
    shared = shape.tied and recipe.software.tied_state_once and recipe.replicas > 1
    if not shared or head == 0 or stage not in (0, head):
        return 0.0
    return vocabulary_rows(shape, recipe) * shape.hidden


def vocabulary_rows(shape: ModelShape, recipe: Recipe) -> float:
    """Rows of the embedding that one tensor rank holds: its share, padded to a multiple of 128."""
    return shape.vocab if recipe.tensor == 1 else 128.0 * math.ceil(shape.vocab / recipe.tensor / 128)


def _sharded_state(shape: ModelShape, recipe: Recipe, count: float, gpus_per_node: int) -> tuple[float, float, float]:
    """As :func:`state_bytes` for fully sharded weights: this layer and the next are gathered."""
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
    """Bytes on one rank of ``stage`` that wait for their backward at its fullest moment, as one begins.

    Layers keep their activations, or their inputs where they are recomputed; behind the last layer the norm keeps its
    input and output and the loss one copy of the logits. Where transfers run beside compute, one message is under way
    and one posted ahead for each neighbour, beside the tensors just computed in both directions, of up to two chunks.
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
    """Bytes on one rank of ``stage`` that come and go within one backward: a recomputed layer, or the loss.

    The logits are gone when the first layer is recomputed, so the two never add up. One copy of the logits waits for
    its backward already.
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
    """Logits of one micro-batch on one rank."""
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
    """Peak bytes of the fullest rank; only the first, second and last stages can be it."""
    stages = sorted({0, min(1, recipe.pipeline - 1), recipe.pipeline - 1})
    found = [stage_memory(shape, recipe, cluster, stage, recompute_share) for stage in stages]
    return max(found, key=lambda memory: memory.total)


def recompute_share(shape: ModelShape, recipe: Recipe, cluster: Cluster) -> float:
    """Share of the layers whose forward is repeated in full.

    0 or 1 where that was asked; for ``auto`` the least share that fits. Block-wise ``selective`` recomputation, as FSDP
    trainers have it, repeats half of the forward, or more where memory needs it.
    """
    blocks = recipe.recompute == "selective" and recipe.software.block_recompute
    if recipe.recompute != "auto" and not blocks:
        return 1.0 if recipe.recompute == "full" else 0.0
    for percent in range(50 if blocks else 0, 100, 5):
        if peak_memory(shape, recipe, cluster, percent / 100).total <= cluster.gpu.memory:
            return percent / 100
    return 1.0
