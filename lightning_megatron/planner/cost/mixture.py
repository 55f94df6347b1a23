"""Mixtures of experts: rows of a rank, the messages that bring them, their products, and what they keep.

A rank has T tokens of a micro-batch; each takes k of E experts, of which E/e are here. If all experts are liked alike,
as many rows arrive as leave: T k. The busiest rank has ``imbalance`` times as many, and the others wait for it. Forward
and backward send 4 T k h elements, of which (e-1)/e leave the rank.
"""

from __future__ import annotations

import math

from lightning_megatron.planner.cost.communication import Group, exchange_seconds
from lightning_megatron.planner.cost.layer_memory import attention_bytes, half_bytes, product_input, tokens_here
from lightning_megatron.planner.model.cluster import Cluster
from lightning_megatron.planner.model.constants import Constants
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape

_TILE = 128
"""Rows of an output tile: the rows of each expert are padded to a multiple of it."""


def check_experts(shape: ModelShape, recipe: Recipe) -> None:
    """Refuse expert ranks that the model's experts cannot be shared out over.

    Raises:
        ValueError: the model has none, or their number is not divisible.
    """
    if recipe.expert > 1 and (not shape.experts or shape.experts % recipe.expert):
        fitting = [str(size) for size in range(1, shape.experts + 1) if shape.experts % size == 0]
        raise ValueError(
            f"`expert={recipe.expert}` does not share out the model's `experts={shape.experts}` evenly; use "
            f"{' or '.join(fitting) if fitting else '1'}"
        )


def routed_tokens(shape: ModelShape, recipe: Recipe) -> float:
    """Tokens T whose experts a rank asks for: tensor ranks take a part each where experts are shared out."""
    return tokens_here(shape, recipe) / (recipe.tensor if recipe.expert > 1 else 1)


def rows_here(shape: ModelShape, recipe: Recipe) -> float:
    """Rows that the experts of the busiest rank compute for one micro-batch."""
    return routed_tokens(shape, recipe) * shape.top_k * recipe.imbalance


def expert_parameters_here(shape: ModelShape, recipe: Recipe) -> float:
    """Parameters of the experts of one layer on a rank."""
    return shape.experts / recipe.expert * shape.expert_parameters


def sent_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes that leave a rank for one mixture and micro-batch, forward and backward: 4 T k h (e-1)/e elements."""
    return 4.0 * _message(shape, recipe) * (recipe.expert - 1) / recipe.expert


def sending_seconds(shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants) -> float:
    """Seconds of the two exchanges of one mixture's forward, or of its backward; the busiest rank's."""
    group = Group(recipe.expert)
    return 2.0 * recipe.imbalance * exchange_seconds(_message(shape, recipe), group, cluster, constants)


def _message(shape: ModelShape, recipe: Recipe) -> float:
    return routed_tokens(shape, recipe) * shape.top_k * shape.hidden * recipe.element


def padded(rows: float, experts: float) -> float:
    """Rows of a grouped product over ``experts``, each expert's padded to whole tiles."""
    return experts * _TILE * math.ceil(rows / experts / _TILE)


def mixture_activation_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes that a layer that is a mixture keeps for the backward of one micro-batch."""
    return attention_bytes(shape, recipe) + experts_bytes(shape, recipe)


def experts_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes that the second half of such a layer keeps: norm, router, rows that arrived, and what experts made of them.

    Rows are kept as they arrive and as they come back, for the gradients of the router's weights.
    """
    element, given = float(recipe.element), product_input(recipe)
    gates = 2 if shape.gated else 1
    inside = element * gates + given + (element if shape.gated and recipe.software.keeps_intermediates else 0.0)
    rows = rows_here(shape, recipe) * ((given + element) * shape.hidden + inside * shape.expert_width)
    router = 8.0 * routed_tokens(shape, recipe) * shape.experts
    return half_bytes(shape, recipe, inside * shape.shared_inner) + rows + router


def passing_experts_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes of gradients that pass in the backward of the experts."""
    inner = recipe.element * shape.expert_width * (3 if shape.gated else 2)
    return rows_here(shape, recipe) * (inner + 2.0 * recipe.element * shape.hidden)
