"""Context parallelism: what attention sends between the ranks that share a sequence, and what it holds meanwhile.

Per layer and micro-batch, for c ranks, t tensor ranks and keys and values of width w in all (2 g h):

| method  | a rank receives in the forward | in the backward                       | holds besides       |
|---------|--------------------------------|---------------------------------------|---------------------|
| gather  | b (s/c) w/t (c-1)              | the same; twice if gathered again     | all keys and values |
| ring    | b (s/c) w/t (c-1)              | 2 c - 1 times b (s/c) w/t             | four blocks of them |
| ulysses | b (s/c) (2 h + w)/t (c-1)/c    | the same                              | exchanged copies    |

Elements, not bytes. Where only n neighbours share the heads (``context_heads``), they exchange as n ranks would, and a
ring of c/n such sets passes on the keys and values of their heads, as many bytes as those of their tokens. A ring's
messages hide under attention where the software overlaps them; the others are exposed.
"""

from __future__ import annotations

from lightning_megatron.planner.cost.communication import Group, exchange_seconds, gather_seconds
from lightning_megatron.planner.cost.layer_memory import tokens_here
from lightning_megatron.planner.model.cluster import Cluster
from lightning_megatron.planner.model.constants import Constants
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape


def check_context(shape: ModelShape, recipe: Recipe) -> None:
    """Refuse context ranks that a sequence, or its heads, cannot be shared out over.

    Raises:
        ValueError: more ranks than tokens, or heads that ``ulysses`` cannot deal out.
    """
    if recipe.context > shape.seq:
        raise ValueError(f"`context={recipe.context}` is more than the `seq={shape.seq}` tokens; lower it")
    if recipe.context > 1 and recipe.context_method == "ulysses" and not deals_heads(shape, recipe):
        raise ValueError(
            f"`context_method=ulysses` deals out heads, and `heads={shape.heads}` (`kv_heads={shape.key_value_heads}`) "
            f"are no multiple of {_dealt_over(recipe)}; use fewer `context_heads`, `ring` or `gather`"
        )


def _dealt_over(recipe: Recipe) -> str:
    named = "context" if recipe.rings == 1 else "context_heads"
    return f"tensor x {named} = {recipe.tensor * recipe.heads_over}"


def deals_heads(shape: ModelShape, recipe: Recipe) -> bool:
    """Whether ``ulysses`` can share out the heads: those of keys may be repeated."""
    ranks = recipe.tensor * recipe.heads_over
    shared = shape.key_value_heads % ranks == 0 or ranks % shape.key_value_heads == 0
    return shape.heads % ranks == 0 and shared


def key_value_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes of the keys and values of this rank's tokens, of one layer and micro-batch."""
    width = 2.0 * shape.key_value_heads * shape.head_size
    return recipe.element * tokens_here(shape, recipe) * width / recipe.tensor


def received_bytes(shape: ModelShape, recipe: Recipe) -> tuple[float, float]:
    """Bytes that a rank receives for one layer and micro-batch: (forward, backward)."""
    exchanged = 0.0
    if recipe.context_method == "ulysses":
        exchanged = exchanged_bytes(shape, recipe) * (recipe.heads_over - 1) / recipe.heads_over
    forward, backward = _passed_bytes(shape, recipe)
    return exchanged + forward, exchanged + backward


def _passed_bytes(shape: ModelShape, recipe: Recipe) -> tuple[float, float]:
    """Those of keys and values of other ranks' tokens: (forward, backward)."""
    ranks, block = recipe.context // recipe.heads_over, key_value_bytes(shape, recipe)
    if ranks == 1:
        return 0.0, 0.0
    once = block * (ranks - 1)
    if recipe.context_method == "gather":
        return once, (2.0 if recipe.software.repeats_gathered else 1.0) * once
    return once, 2.0 * once + block


def exchanged_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes of queries, keys, values and outputs of this rank's tokens."""
    width = shape.qkv_width + shape.head_size * shape.heads
    return recipe.element * tokens_here(shape, recipe) * width / recipe.tensor


def context_seconds(shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants) -> tuple[float, float]:
    """Seconds of a layer's messages between context ranks: (forward, backward), none of them hidden."""
    if recipe.context == 1:
        return 0.0, 0.0
    exchange = 0.0
    if recipe.context_method == "ulysses":
        group = Group(recipe.heads_over, recipe.tensor)
        exchange = exchange_seconds(exchanged_bytes(shape, recipe), group, cluster, constants)
    there, back = passing_seconds(shape, recipe, cluster, constants)
    return exchange + there, exchange + back


def passing_seconds(shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants) -> tuple[float, float]:
    """Seconds in which keys and values pass between ranks, or between sets of ranks that share heads."""
    ranks = recipe.context // recipe.heads_over
    if ranks == 1:
        return 0.0, 0.0
    forward, backward = _passed_bytes(shape, recipe)
    group = Group(ranks, recipe.tensor * recipe.heads_over)
    once = gather_seconds(ranks * key_value_bytes(shape, recipe), group, cluster, constants)
    return once, once * backward / forward


def held_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes that attention holds beside its own tensors while it meets other ranks' tokens."""
    if recipe.context == 1:
        return 0.0
    if recipe.context_method == "ulysses":
        around = 4 * key_value_bytes(shape, recipe) if recipe.rings > 1 else 0.0
        return exchanged_bytes(shape, recipe) + around
    return key_value_bytes(shape, recipe) * (recipe.context if recipe.context_method == "gather" else 4)
