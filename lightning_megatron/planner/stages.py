"""What one pipeline stage does for one micro-batch: the layers it owns, and the seconds each part of them takes.

Stages differ: the first has the embedding, the last the output head, and layers seldom divide evenly. The slowest stage
sets the pace of the pipeline, so stages are priced one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.planner.cluster import Cluster
from lightning_megatron.planner.communication import Group, all_reduce_seconds, gather_seconds, send_seconds
from lightning_megatron.planner.compute import LayerSeconds, head_seconds, layer_seconds
from lightning_megatron.planner.constants import Constants
from lightning_megatron.planner.recipe import Recipe
from lightning_megatron.planner.shape import ModelShape

@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one stage for one micro-batch, all its chunks together.

    Args:
        forward, input_gradient, weight_gradient: compute and exposed communication.
        communication: the part of these that is exposed tensor- and context-parallel communication.
        transfer: exposed sends and receives, once per micro-batch.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    communication: float
    transfer: float

    @property
    def total(self) -> float:
        """Forward, backward and transfers."""
        return self.forward + self.input_gradient + self.weight_gradient + self.transfer


def split_layers(layers: int, stages: int, chunks: int = 1) -> list[int]:
    """Layers per pipeline rank, chunks added up.

    Even where it divides; otherwise the embedding and the head count as a layer each where that divides (62 layers on
    32 stages: 1, 2, 2, ..., 1); otherwise the first virtual stages hold one more.

    Raises:
        ValueError: fewer layers than virtual stages.
    """
    slots = stages * chunks
    counted = stages > 1 and (layers + 2) % slots == 0
    if layers < slots and not counted:
        raise ValueError(f"`layers={layers}` is less than pipeline x chunks = {stages} x {chunks}; lower one of these")
    if layers % slots and counted:
        per_slot = [(layers + 2) // slots] * slots
        per_slot[0] -= 1
        per_slot[-1] -= 1
    else:
        per_slot = [layers // slots + (1 if slot < layers % slots else 0) for slot in range(slots)]
    return [sum(per_slot[stage::stages]) for stage in range(stages)]


def stage_costs(
    shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants, recompute_share: float
) -> list[StageSeconds]:
    """Price every stage, first to last.

    Args:
        shape, recipe, cluster, constants: what is run, how, and where.
        recompute_share: share of the layers whose forward is repeated in full.
    """
    layer = layer_seconds(shape, recipe, cluster.gpu, constants)
    forward_transfer, backward_transfer = layer_communication(shape, recipe, cluster, constants, layer)
    repeated = _repeated_seconds(recipe, layer, forward_transfer, recompute_share)
    backward_comm = backward_transfer + recompute_share * forward_transfer
    head = head_seconds(shape, recipe, cluster.gpu, constants)
    per_stage = split_layers(shape.layers, recipe.pipeline, recipe.chunks)
    transfer = transfer_seconds(shape, recipe, cluster, constants)
    costs = []
    for stage, count in enumerate(per_stage):
        last = stage == recipe.pipeline - 1
        costs.append(
            StageSeconds(
                forward=count * (layer.forward + forward_transfer) + (head[0] if last else 0.0),
                input_gradient=count * (layer.input_gradient + backward_transfer + repeated)
                + (0.5 * head[1] if last else 0.0),
                weight_gradient=count * layer.weight_gradient + (0.5 * head[1] if last else 0.0),
                communication=count * (forward_transfer + backward_comm),
                transfer=transfer,
            )
        )
    return costs


def _repeated_seconds(recipe: Recipe, layer: LayerSeconds, transfer: float, share: float) -> float:
    """Seconds per layer that recomputation adds to the backward."""
    full = share * (layer.forward + transfer)
    if recipe.recompute != "selective" or recipe.software.block_recompute:
        return full
    return full + layer.attention_core


def layer_communication(
    shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants, layer: LayerSeconds
) -> tuple[float, float]:
    """Exposed seconds of tensor- and context-parallel communication of one layer: forward and backward."""
    forward, backward = _tensor_seconds(shape, recipe, cluster, constants)
    ring = _context_seconds(shape, recipe, cluster, constants)
    core = layer.attention_core
    forward += hidden_cost(ring, core, constants)
    backward += hidden_cost(2.0 * ring, 2.5 * core, constants)
    return forward, backward


def _tensor_seconds(
    shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants
) -> tuple[float, float]:
    """Exposed seconds of a layer's tensor-parallel collectives: two all-reduces (or gather and scatter) each way."""
    if recipe.tensor == 1:
        return 0.0, 0.0
    size = 2.0 * recipe.micro_batch * shape.seq / recipe.context * shape.hidden
    once = 2.0 * all_reduce_seconds(size, Group(recipe.tensor), cluster, constants)
    hidden = constants.tensor_hidden if recipe.software.overlap_tensor else 0.0
    exposed = once * (1.0 - hidden * (1.0 - constants.contention))
    return exposed, exposed


def _context_seconds(shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants) -> float:
    """Seconds in which a layer's keys and values travel once around the context-parallel ring."""
    if recipe.context == 1:
        return 0.0
    width = 2.0 * shape.key_value_heads * shape.head_size / recipe.tensor
    size = 2.0 * recipe.micro_batch * shape.seq * width
    return gather_seconds(size, Group(recipe.context, recipe.tensor), cluster, constants)


def hidden_cost(transfer: float, compute: float, constants: Constants) -> float:
    """What a transfer costs beside ``compute`` seconds of other work: its overhang, and contention for the rest."""
    return max(0.0, transfer - compute) + constants.contention * min(transfer, compute)


def transfer_seconds(shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants) -> float:
    """Exposed seconds per micro-batch of a stage's sends and receives, all chunks together.

    Each tensor rank sends its own 1/t of the boundary activation. A steady-state stage exchanges one activation and one
    gradient per chunk and micro-batch.
    """
    if recipe.pipeline == 1:
        return 0.0
    stride = recipe.tensor * recipe.context * recipe.data
    size = 2.0 * recipe.micro_batch * shape.seq / recipe.context * shape.hidden / recipe.tensor
    once = send_seconds(size, stride, cluster, constants)
    if not recipe.sequence_parallel and recipe.tensor > 1:
        once += gather_seconds(size * recipe.tensor, Group(recipe.tensor), cluster, constants)
    exposed = constants.contention if recipe.software.overlap_pipeline else 1.0
    return 2.0 * recipe.chunks * once * exposed
