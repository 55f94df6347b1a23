"""Activations in host memory: which share of them, its bytes there and on the GPU, and the seconds it costs.

Of a layer's activations, the input and what attention put out always leave, as repeating attention would be quadratic
in the tokens; of the others leaves a share a of the tokens, and the rest is computed again (MEMO, arXiv 2407.12117).
The last two layers stay on the GPU. The largest share whose copies take no longer than the forward, and that host
memory holds, is::

    a = min(1, (B T - S_in - S_core) / S_other, (M / (layers - 2) - S_in - S_core) / S_other)

with B bytes/s of the link, T seconds of a layer's forward and M bytes of host memory per GPU. ``inputs`` sends only the
inputs of layers that are computed again in full, which is what long sequences train with in ALST (arXiv 2506.13996).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_megatron.planner.cost.compute import LayerSeconds, layer_seconds
from lightning_megatron.planner.cost.layer_memory import checkpoint_bytes, core_output_bytes, layer_activation_bytes
from lightning_megatron.planner.cost.stage_layers import in_flight, layers_of_ranks
from lightning_megatron.planner.model.cluster import Cluster
from lightning_megatron.planner.model.constants import DEFAULT_CONSTANTS, Constants
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape

KEPT_LAYERS = 2
"""Layers whose activations are on the GPU: one in its backward, one on its way."""


@dataclass(frozen=True, slots=True)
class ActivationParts:
    """Bytes of one layer's activations of one micro-batch.

    Attributes:
        always: input and output of attention; the input alone where layers are computed again in full.
        other: what may leave or be computed again.
    """

    always: float
    other: float


def parts(shape: ModelShape, recipe: Recipe) -> ActivationParts:
    """The parts of a layer's activations that always leave, and those that may."""
    if recipe.activation_offload == "inputs":
        return ActivationParts(checkpoint_bytes(shape, recipe), 0.0)
    always = checkpoint_bytes(shape, recipe) + core_output_bytes(shape, recipe)
    return ActivationParts(always, max(0.0, layer_activation_bytes(shape, recipe) - always))


def leaving_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes of one layer and micro-batch that go to host memory; 0 without offload."""
    if recipe.activation_offload is None:
        return 0.0
    found = parts(shape, recipe)
    return found.always + _share(recipe) * found.other


def held_on_host(shape: ModelShape, recipe: Recipe, stage: int) -> float:
    """Bytes of activations of ``stage`` in host memory."""
    layers = in_flight(recipe, stage) * layers_of_ranks(shape, recipe)[stage]
    return max(0.0, layers - KEPT_LAYERS) * leaving_bytes(shape, recipe)


def settled(
    shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants = DEFAULT_CONSTANTS, taken: float = 0.0
) -> Recipe:
    """The recipe with the largest share in place of ``activation_offload="auto"``; any other one as it is.

    Args:
        shape, recipe, cluster, constants: model, layout, machine and calibrated constants.
        taken: bytes of host memory per GPU that are not free for activations.
    """
    if recipe.activation_offload != "auto":
        return recipe
    found = parts(shape, recipe)
    layer = layer_seconds(shape, recipe, cluster.gpu, constants)
    held = max(
        in_flight(recipe, stage) * count - KEPT_LAYERS for stage, count in enumerate(layers_of_ranks(shape, recipe))
    )
    room = [cluster.host_bandwidth * layer.forward]
    if held > 0:
        room.append((cluster.host_share(recipe.world) - taken) / held)
    share = (min(room) - found.always) / found.other if found.other else 1.0
    return replace(recipe, activation_offload=min(1.0, max(0.0, share)))


def exposed_seconds(shape: ModelShape, recipe: Recipe, cluster: Cluster, layer: LayerSeconds) -> tuple[float, float]:
    """Seconds per layer and micro-batch that offload adds to (forward, backward).

    Copies take no processors of the GPU, so they cost only what exceeds the layer's own time. The linear parts of the
    tokens that stayed are computed again.
    """
    if recipe.activation_offload is None:
        return 0.0, 0.0
    copy = leaving_bytes(shape, recipe) / cluster.host_bandwidth
    again = 0.0
    if recipe.activation_offload != "inputs":
        again = (1.0 - _share(recipe)) * (layer.forward - layer.attention_core)
    return max(0.0, copy - layer.forward), max(0.0, copy - layer.backward) + again


def repeated_share(recipe: Recipe) -> float:
    """Share of the layers' matrix products that is computed again."""
    return 0.0 if recipe.activation_offload in (None, "inputs") else 1.0 - _share(recipe)


def _share(recipe: Recipe) -> float:
    value = recipe.activation_offload
    return float(value) if isinstance(value, (int, float)) else 0.0
