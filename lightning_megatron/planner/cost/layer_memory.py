"""Bytes that one layer keeps for its backward, and those that pass in it, tensor by tensor.

Counting tensors as autograd keeps them leaves no need for separate formulas for gated MLPs, grouped heads, 8-bit inputs
and fused attention. For f = 4h, 16 bits, dropout and unfused attention the count is sbh (10 + 24/t + 5as/(ht)), as in
Korthikanti et al. (arXiv 2205.05198, table 2).
"""

from __future__ import annotations

from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape


def tokens_here(shape: ModelShape, recipe: Recipe) -> float:
    """Tokens of one micro-batch on a rank."""
    return recipe.micro_batch * shape.seq / recipe.context


def layer_activation_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes that one layer keeps for the backward of one micro-batch, without full recomputation."""
    return attention_bytes(shape, recipe) + mlp_bytes(shape, recipe)


def checkpoint_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes of a layer's input, which is all that a fully recomputed layer keeps of one micro-batch."""
    split = recipe.tensor if recipe.sequence_parallel else 1
    return recipe.element * tokens_here(shape, recipe) * shape.hidden / split


def attention_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes that the first half of a layer keeps: norm, attention and its projections."""
    element, given = float(recipe.element), product_input(recipe)
    width = shape.head_size * shape.heads
    parallel = element * shape.qkv_width + given * width
    if recipe.software.fused_attention:
        parallel += (element - given) * width + 4.0 * shape.heads
    elif recipe.recompute != "selective":
        parallel += (2.0 * element + 1.0) * shape.heads * shape.seq
    return half_bytes(shape, recipe, parallel)


def mlp_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes that the second half of a layer keeps: norm and MLP, or the norm's alone for an MLP in pieces."""
    return half_bytes(shape, recipe, 0.0 if recipe.mlp_chunks > 1 else _inner_bytes(shape, recipe))


def _inner_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes per token that an MLP keeps of its inner width."""
    element = float(recipe.element)
    parallel = shape.inner * (element * (2 if shape.gated else 1) + product_input(recipe))
    if shape.gated and recipe.software.keeps_intermediates:
        parallel += element * shape.inner
    return parallel


def core_output_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes of the output and the log-sum-exp of fused attention, from which its backward needs no repetition."""
    width = shape.head_size * shape.heads
    return tokens_here(shape, recipe) * (recipe.element * width + 4.0 * shape.heads) / recipe.tensor


def passing_layer_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes that pass in the backward of a layer that is computed again: its activations, and gradients of these.

    The MLP comes first, with all activations alive; then attention, with its own. Beside the gradients of its inputs
    and of its output, fused attention's backward sums those of the queries in 32 bits, and makes those of shared keys
    and values for every head (FlashAttention-2).
    """
    tokens, element = tokens_here(shape, recipe), float(recipe.element)
    width = shape.head_size * shape.heads
    attention = element * (shape.qkv_width + width)
    if recipe.software.fused_attention:
        attention += 4.0 * width
        attention += 2.0 * element * width if shape.key_value_heads < shape.heads else 0.0
    mlp = element * shape.inner * (3 if shape.gated else 2)
    if recipe.mlp_chunks > 1:
        mlp = (mlp + _inner_bytes(shape, recipe)) / recipe.mlp_chunks
    split = recipe.tensor if recipe.sequence_parallel else 1
    stream = 2.0 * tokens * element * shape.hidden / split  # the gradient that comes, and the one that is made
    first = mlp_bytes(shape, recipe) + tokens * mlp / recipe.tensor
    return attention_bytes(shape, recipe) + stream + max(first, tokens * attention / recipe.tensor)


def half_bytes(shape: ModelShape, recipe: Recipe, parallel: float) -> float:
    """Bytes of half a layer, of which ``parallel`` per token lie in tensor-parallel regions.

    Outside of them are the norm's input and output, and a mask of dropout.
    """
    split = recipe.tensor if recipe.sequence_parallel else 1
    hidden, given = float(recipe.element), product_input(recipe)
    hidden += 0.0 if recipe.software.keeps_gathered else given
    whole = given if recipe.software.keeps_gathered else 0.0
    if recipe.software.dropout:
        hidden += 1.0
    if shape.gated and recipe.software.keeps_intermediates:
        hidden += 4.0
    return tokens_here(shape, recipe) * ((hidden / split + whole) * shape.hidden + parallel / recipe.tensor)


def product_input(recipe: Recipe) -> float:
    """Bytes of an input that a matrix product keeps."""
    return 1.0 if recipe.precision == "fp8" and recipe.software.keeps_8_bit_inputs else float(recipe.element)
