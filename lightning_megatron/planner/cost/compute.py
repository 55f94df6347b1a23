"""Compute time: matrix products, attention and memory passes of one layer.

The time of a layer is more than its FLOPs over a peak. Products made small by tensor parallelism or a small micro-batch
do not fill the tiles and pipelines of the GPU, and every norm, activation and (without fused attention) score matrix is
read from and written to memory. All times are for one tensor rank and one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.planner.cost.layer_memory import tokens_here
from lightning_megatron.planner.cost.mixture import padded, rows_here
from lightning_megatron.planner.model.cluster import Gpu
from lightning_megatron.planner.model.constants import Constants
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape

_TILE = 128 * 128
_ROW_PASSES = 6.0
_ALIGNMENT = 8
_LOGIT_BYTES = 30.0
"""Bytes read and written per logit for a 16-bit product, a 32-bit softmax and its gradient (about eight passes)."""
_OPTIMIZER_BYTES = 34.0
"""Bytes per parameter that Adam with 32-bit master weights moves: it reads gradient, master weight and moments, and
writes them back."""


@dataclass(frozen=True, slots=True)
class MemoryPasses:
    """Number of reads and writes of activations of each width.

    Attributes:
        hidden: of width ``hidden``.
        inner: of the MLP's inner width.
        qkv: of the width of queries, keys and values together.
    """

    hidden: float
    inner: float
    qkv: float


def _passes(recipe: Recipe, gated: bool, backward: bool) -> MemoryPasses:
    """Memory passes of norms, residuals, dropout, activations, rotary embeddings and biases of one layer.

    Fused kernels read their inputs and write their output once. Without fusion a norm is about five kernels, a gated
    activation two, a rotary embedding three.
    """
    drop = 2.5 if recipe.software.dropout else 0.0
    if recipe.software.fused_kernels:
        hidden, inner, qkv = (14.0, (3.0, 5.0), 2.0) if backward else (10.0, (2.0, 3.0), 2.0)
    else:
        hidden, inner, qkv = (30.0, (6.0, 8.0), 8.0) if backward else (20.0, (4.0, 5.0), 6.0)
    return MemoryPasses(hidden + drop, inner[gated], qkv)


def gemm_seconds(rows: float, columns: float, inner: float, gpu: Gpu, constants: Constants, precision: str) -> float:
    """Seconds of one matrix product [rows, inner] x [inner, columns].

    Small outputs reach a lower share of the peak (the last wave of tiles is partly idle), and so do small inner
    dimensions (each tile fills and drains its pipeline). The time of memory traffic is a lower bound.
    """
    flops = 2.0 * rows * columns * inner
    element = {"fp8": 1.0, "fp32": 4.0, "fp64": 8.0}.get(precision, 2.0)
    tiles = 1.0 + constants.tile_waste * gpu.processors * _TILE / (rows * columns)
    pipeline = 1.0 + constants.k_half / inner
    compute = flops / (gpu.peak(precision) * constants.gemm(gpu.generation, precision)) * tiles * pipeline
    traffic = (rows * inner + inner * columns) * element + max(element, 2.0) * rows * columns
    return max(compute, traffic / (gpu.bandwidth * constants.memory))


def product_and_gradients(
    rows: float, columns: float, inner: float, gpu: Gpu, constants: Constants, precision: str
) -> tuple[float, float, float]:
    """Seconds of a linear layer: (forward, input gradient, weight gradient)."""
    return (
        gemm_seconds(rows, columns, inner, gpu, constants, precision),
        gemm_seconds(rows, inner, columns, gpu, constants, precision),
        gemm_seconds(inner, columns, rows, gpu, constants, precision),
    )


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds of one layer for one micro-batch on one tensor rank, without communication.

    Attributes:
        forward: whole forward.
        input_gradient: gradient of the layer's input, with the backward of everything but weights.
        weight_gradient: gradients of the weights.
        attention_core: forward of the attention core, which is part of ``forward``.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    attention_core: float

    @property
    def backward(self) -> float:
        """Seconds of both gradients."""
        return self.input_gradient + self.weight_gradient


def layer_seconds(
    shape: ModelShape, recipe: Recipe, gpu: Gpu, constants: Constants, mixture: bool = False
) -> LayerSeconds:
    """Seconds of one transformer layer, or of one with a mixture of experts, on one rank for one micro-batch."""
    tokens = recipe.micro_batch * shape.seq / recipe.context
    forward = data = weight = 0.0
    for columns, depth in _products(shape, recipe, mixture):
        times = product_and_gradients(tokens, columns, depth, gpu, constants, recipe.precision)
        forward, data, weight = forward + times[0], data + times[1], weight + times[2]
    if mixture:
        times = _experts_seconds(shape, recipe, gpu, constants)
        forward, data, weight = forward + times[0], data + times[1], weight + times[2]
    core_forward, core_backward = _attention_seconds(shape, recipe, gpu, constants)
    forward += core_forward + _elementwise_seconds(shape, recipe, gpu, constants, False)
    data += core_backward + _elementwise_seconds(shape, recipe, gpu, constants, True)
    floor, wait = constants.launch, constants.blocking if recipe.software.blocking_launches else 0.0
    forward = max(forward, floor) + wait
    return LayerSeconds(forward, max(data, floor) + wait, max(weight, floor) + wait, core_forward)


def _products(shape: ModelShape, recipe: Recipe, mixture: bool) -> list[tuple[float, float]]:
    """(columns, inner dimension) of the products that all tokens of a layer take."""
    tensor, hidden = recipe.tensor, float(shape.hidden)
    width = shape.head_size * shape.heads / tensor
    # Of latent attention only the sum of its matrices is known: it is counted as one product as wide as they need.
    joint = shape.attention_matrix_parameters / hidden / tensor - width
    found = [(joint, hidden), (hidden, width)]
    inner = (shape.shared_inner if mixture else shape.inner) / tensor
    if inner:
        found += [*([(inner, hidden)] * (2 if shape.gated else 1)), (hidden, inner)]
    return [*found, (float(shape.experts), hidden)] if mixture else found


def _experts_seconds(shape: ModelShape, recipe: Recipe, gpu: Gpu, constants: Constants) -> tuple[float, float, float]:
    """Seconds of the experts of one mixture on a rank: (forward, input gradient, weight gradient).

    The rows of an expert fill whole tiles, all experts' weights are read, and rows are sorted, sent, put back in order
    and weighed: six passes over them in each direction.
    """
    here = shape.experts / recipe.expert
    rows = padded(rows_here(shape, recipe), here)
    hidden, width = float(shape.hidden), float(shape.expert_width)
    total = [0.0, 0.0, 0.0]
    reading = (here - 1.0) * hidden * width * recipe.element / (gpu.bandwidth * constants.memory)
    for columns, depth in [*([(width, hidden)] * (2 if shape.gated else 1)), (hidden, width)]:
        times = product_and_gradients(rows, columns, depth, gpu, constants, recipe.precision)
        total = [known + max(time, reading) for known, time in zip(total, times, strict=True)]
    moving = _ROW_PASSES * rows_here(shape, recipe) * hidden * recipe.element / (gpu.bandwidth * constants.memory)
    return total[0] + moving, total[1] + moving, total[2]


def mlp_seconds(shape: ModelShape, recipe: Recipe, gpu: Gpu, constants: Constants) -> float:
    """Seconds of the products of a dense layer's MLP in the forward."""
    rows, inner, hidden = tokens_here(shape, recipe), shape.inner / recipe.tensor, float(shape.hidden)
    up = gemm_seconds(rows, inner, hidden, gpu, constants, recipe.precision)
    return (2 if shape.gated else 1) * up + gemm_seconds(rows, hidden, inner, gpu, constants, recipe.precision)


def _elementwise_seconds(shape: ModelShape, recipe: Recipe, gpu: Gpu, constants: Constants, backward: bool) -> float:
    """Seconds of a layer's memory passes in the forward or the backward."""
    passes = _passes(recipe, shape.gated, backward)
    tokens = recipe.micro_batch * shape.seq / recipe.context
    split = recipe.tensor if recipe.sequence_parallel else 1
    elements = passes.hidden * shape.hidden / split
    elements += (passes.inner * shape.inner + passes.qkv * shape.qkv_width) / recipe.tensor
    bytes_moved = (
        recipe.element * tokens * elements * (1.0 if recipe.software.fused_kernels else constants.eager_passes)
    )
    if recipe.precision == "fp8":
        inputs = 2.0 * shape.hidden + (shape.inner + shape.head_size * shape.heads) / recipe.tensor
        bytes_moved += 4.0 * tokens * inputs
    return bytes_moved / (gpu.bandwidth * constants.memory)


def _attention_seconds(shape: ModelShape, recipe: Recipe, gpu: Gpu, constants: Constants) -> tuple[float, float]:
    """Seconds of the attention core (scores, softmax, product with the values): (forward, backward)."""
    if recipe.software.fused_attention:
        return _fused_attention_seconds(shape, recipe, gpu, constants)
    return _unfused_attention_seconds(shape, recipe, gpu, constants)


def _fused_attention_seconds(shape: ModelShape, recipe: Recipe, gpu: Gpu, constants: Constants) -> tuple[float, float]:
    """Seconds of causal FlashAttention: half of the score matrix, and 2.5 times the forward's FLOPs in the backward."""
    heads = shape.heads / recipe.tensor
    flops = 2.0 * recipe.micro_batch * heads * shape.head_size * shape.seq * shape.seq / recipe.context
    forward = flops / (gpu.peak(_head_precision(recipe)) * constants.attention(gpu.generation, shape.seq))
    return forward, 2.5 * forward


def _unfused_attention_seconds(
    shape: ModelShape, recipe: Recipe, gpu: Gpu, constants: Constants
) -> tuple[float, float]:
    """Seconds of attention with scores in memory: two batched products, and memory passes of softmax and dropout."""
    batch = recipe.micro_batch * shape.heads / recipe.tensor
    rows = shape.seq / recipe.context
    product = batch * _batched_product_seconds(rows, shape.seq, shape.head_size, batch, gpu, constants)
    scores = 2.0 * batch * rows * shape.seq / (gpu.bandwidth * constants.memory)
    passes = constants.score_passes * scores
    return 2.0 * product + passes, 4.0 * product + 1.25 * passes


def _batched_product_seconds(
    rows: float, columns: float, inner: int, batch: float, gpu: Gpu, constants: Constants
) -> float:
    """Seconds of one product of a batch; inner dimensions that are no multiple of 8 do not use tensor cores."""
    if inner % _ALIGNMENT:
        return 2.0 * rows * columns * inner / (gpu.peak_16 * constants.misaligned)
    together = gemm_seconds(rows * batch, columns, inner, gpu, constants, "bf16")
    return together / batch


def head_seconds(shape: ModelShape, recipe: Recipe, gpu: Gpu, constants: Constants) -> tuple[float, float]:
    """Seconds of the output head and the loss for one micro-batch: (forward, backward)."""
    tokens = recipe.micro_batch * shape.seq / recipe.context
    columns = shape.vocab / recipe.tensor
    forward, data, weight = product_and_gradients(
        tokens, columns, float(shape.hidden), gpu, constants, _head_precision(recipe)
    )
    loss = _LOGIT_BYTES * tokens * columns / (gpu.bandwidth * constants.memory)
    return forward + 0.5 * loss, data + weight + 0.5 * loss


def _head_precision(recipe: Recipe) -> str:
    """Precision of the output head and of attention: bf16 if the layers' products are 8-bit."""
    return "bf16" if recipe.precision == "fp8" else recipe.precision


def accumulation_seconds(parameters: float, recipe: Recipe, gpu: Gpu, constants: Constants) -> float:
    """Seconds to accumulate one micro-batch's weight gradients of ``parameters`` into the main gradients.

    A separate kernel reads the new gradient and the sum, and writes the sum. It costs nothing if the products
    accumulate into the sum themselves, and next to nothing for a shard, which is a fraction of the weights.
    """
    if recipe.software.direct_gradients or recipe.sharding in ("fsdp", "hsdp") or recipe.micro_batches == 1:
        return 0.0
    moved = recipe.element + 2.0 * recipe.bytes_per_gradient
    return moved * parameters / (gpu.bandwidth * constants.memory)


def optimizer_seconds(parameters: float, gpu: Gpu, constants: Constants) -> float:
    """Seconds of gradient norm and Adam over the ``parameters`` that one rank updates."""
    return _OPTIMIZER_BYTES * parameters / (gpu.bandwidth * constants.memory)
