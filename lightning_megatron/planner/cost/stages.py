"""The seconds that each pipeline stage takes for one micro-batch.

Stages differ: the first has the embedding, the last the output head, and layers seldom divide evenly. The slowest stage
sets the pace of the pipeline, so the cost of each stage is computed separately.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_megatron.planner.cost.communication import Group, all_reduce_seconds, gather_seconds, send_seconds
from lightning_megatron.planner.cost.compute import (
    LayerSeconds,
    accumulation_seconds,
    head_seconds,
    layer_seconds,
    mlp_seconds,
)
from lightning_megatron.planner.cost.context_ranks import context_seconds, passing_seconds
from lightning_megatron.planner.cost.host_activations import exposed_seconds
from lightning_megatron.planner.cost.mixture import expert_parameters_here, sending_seconds
from lightning_megatron.planner.cost.stage_layers import mixtures_of_stages, split_layers
from lightning_megatron.planner.model.cluster import Cluster
from lightning_megatron.planner.model.constants import Constants
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one virtual stage, or of all virtual stages of one rank, for one micro-batch.

    Args:
        forward, input_gradient, weight_gradient: compute and exposed communication.
        communication: exposed tensor-parallel communication, included in the above.
        transfer: exposed sends and receives, during which the stage does not compute.
        flight: the rest of one transfer, which overlaps with compute.
        exchange: rows sent to experts and back, included in the first three.
        context: exposed messages between context ranks, included in the first three.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    communication: float
    transfer: float
    flight: float
    exchange: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of forward, backward and exposed transfers."""
        return self.forward + self.input_gradient + self.weight_gradient + self.transfer

    def times(self, count: float) -> StageSeconds:
        """Cost of ``count`` such stages on one rank."""
        return StageSeconds(*(count * getattr(self, field.name) for field in fields(self)))

    def plus(self, other: StageSeconds) -> StageSeconds:
        """Cost of both stages on one rank."""
        return StageSeconds(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
            self.communication + other.communication,
            self.transfer + other.transfer,
            max(self.flight, other.flight),
            self.exchange + other.exchange,
            self.context + other.context,
        )


def stage_costs(
    shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants, recompute_share: float
) -> list[StageSeconds]:
    """Cost of every virtual stage, first to last.

    Args:
        shape, recipe, cluster, constants: model, layout, machine and calibrated constants.
        recompute_share: share of the layers that are fully recomputed.
    """
    layer = layer_seconds(shape, recipe, cluster.gpu, constants)
    tensor = _tensor_seconds(shape, recipe, cluster, constants)
    context = _context_seconds(shape, recipe, cluster, constants, layer)
    forward_transfer, backward_transfer = tensor[0] + context[0], tensor[1] + context[1]
    repeated = _repeated_seconds(recipe, layer, forward_transfer, recompute_share)
    head = head_seconds(shape, recipe, cluster.gpu, constants)
    if recipe.loss_chunks > 1:  # computed in the backward again
        head = head[0], head[1] + head[0]
    if recipe.mlp_chunks > 1:
        repeated += mlp_seconds(shape, recipe, cluster.gpu, constants)
    out, back = exposed_seconds(shape, recipe, cluster, layer)
    added = accumulation_seconds(shape.layer_parameters / recipe.tensor, recipe, cluster.gpu, constants)
    added_vocab = accumulation_seconds(shape.vocab * shape.hidden / recipe.tensor, recipe, cluster.gpu, constants)
    per_stage = split_layers(shape.layers, recipe.virtual_stages)
    mixtures = mixtures_of_stages(shape, recipe) if shape.experts else [0] * recipe.virtual_stages
    mixed = _mixture_seconds(shape, recipe, cluster, constants, layer, recompute_share)
    transfer, exposed = transfer_seconds(shape, recipe, cluster, constants)
    costs = []
    for stage, count in enumerate(per_stage):
        last = float(stage == recipe.virtual_stages - 1)
        ends = last + float(stage == 0)
        costs.append(
            mixed.times(mixtures[stage]).plus(
                StageSeconds(
                    forward=count * (layer.forward + forward_transfer + out) + last * head[0],
                    input_gradient=count * (layer.input_gradient + backward_transfer + repeated + back)
                    + last * 0.5 * head[1],
                    weight_gradient=count * (layer.weight_gradient + added) + last * 0.5 * head[1] + ends * added_vocab,
                    communication=count * ((1.0 + recompute_share) * tensor[0] + tensor[1]),
                    transfer=2.0 * exposed * transfer,
                    flight=(1.0 - exposed) * transfer,
                    context=count * ((1.0 + recompute_share) * context[0] + context[1]),
                )
            )
        )
    return costs


def _mixture_seconds(
    shape: ModelShape,
    recipe: Recipe,
    cluster: Cluster,
    constants: Constants,
    layer: LayerSeconds,
    recompute_share: float,
) -> StageSeconds:
    """Extra time of a layer for being a mixture of experts instead of dense; all zero without mixtures."""
    if not shape.experts:
        return StageSeconds(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    mixture = layer_seconds(shape, recipe, cluster.gpu, constants, mixture=True)
    sending = sending_seconds(shape, recipe, cluster, constants)
    again = recompute_share * (mixture.forward - layer.forward + sending)
    weights = shape.mixture_beside_parameters / recipe.tensor + expert_parameters_here(shape, recipe)
    weights -= shape.layer_matrix_parameters / recipe.tensor
    added = accumulation_seconds(weights, recipe, cluster.gpu, constants)
    return StageSeconds(
        forward=mixture.forward - layer.forward + sending,
        input_gradient=mixture.input_gradient - layer.input_gradient + sending + again,
        weight_gradient=mixture.weight_gradient - layer.weight_gradient + added,
        communication=0.0,
        transfer=0.0,
        flight=0.0,
        exchange=(2.0 + recompute_share) * sending,
    )


def rank_costs(costs: list[StageSeconds], recipe: Recipe) -> list[StageSeconds]:
    """Cost of every pipeline rank: the sum over its virtual stages."""
    found = [StageSeconds(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)] * recipe.pipeline
    for stage, cost in enumerate(costs):
        rank = recipe.rank_of(stage)
        found[rank] = found[rank].plus(cost)
    return found


def _repeated_seconds(recipe: Recipe, layer: LayerSeconds, transfer: float, share: float) -> float:
    """Seconds per layer that recomputation adds to the backward."""
    full = share * (layer.forward + transfer)
    if recipe.context > 1 and recipe.context_method == "gather" and recipe.software.repeats_gathered:
        full += layer.attention_core
    if recipe.recompute != "selective" or recipe.software.block_recompute:
        return full
    return full + layer.attention_core


def _context_seconds(
    shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants, layer: LayerSeconds
) -> tuple[float, float]:
    """Exposed seconds of one layer's messages between context ranks: (forward, backward)."""
    there, back = context_seconds(shape, recipe, cluster, constants)
    if recipe.context_method == "gather" or not recipe.software.overlap_context:
        return there, back
    core, (passed, returned) = layer.attention_core, passing_seconds(shape, recipe, cluster, constants)
    hidden = hidden_cost(passed, core, constants), hidden_cost(returned, 2.5 * core, constants)
    return there - passed + hidden[0], back - returned + hidden[1]


def _tensor_seconds(shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants) -> tuple[float, float]:
    """Exposed seconds of a layer's tensor-parallel collectives: (forward, backward), with two all-reduces each.

    With sequence parallelism these are all-gathers and reduce-scatters of the same volume.
    """
    if recipe.tensor == 1:
        return 0.0, 0.0
    size = recipe.element * recipe.micro_batch * shape.seq / recipe.context * shape.hidden
    once = 2.0 * all_reduce_seconds(size, Group(recipe.tensor), cluster, constants)
    hidden = constants.tensor_hidden if recipe.software.overlap_tensor else 0.0
    exposed = once * (1.0 - hidden * (1.0 - constants.contention))
    return exposed, exposed


def hidden_cost(transfer: float, compute: float, constants: Constants) -> float:
    """Exposed seconds of a transfer that overlaps with ``compute`` seconds of work.

    These are the seconds by which the transfer is longer, and a share ``contention`` of the overlap.
    """
    return max(0.0, transfer - compute) + constants.contention * min(transfer, compute)


def transfer_seconds(shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants) -> tuple[float, float]:
    """Seconds of one transfer between stages, and the share of it that is exposed.

    Each tensor rank sends 1/t of the boundary activation, and without sequence parallelism the receivers all-gather it.
    Software without ``scatter_gather`` sends all of it from every rank, unless activations are split by sequence
    parallelism. Software that does not overlap transfers exposes all of it.
    """
    if recipe.pipeline == 1:
        return 0.0, 0.0
    stride = recipe.tensor * recipe.context * recipe.data
    whole = recipe.element * recipe.micro_batch * shape.seq / recipe.context * shape.hidden
    if not recipe.sequence_parallel and not recipe.software.scatter_gather:
        once = send_seconds(whole, stride, cluster, constants)
    else:
        once = send_seconds(whole / recipe.tensor, stride, cluster, constants)
        once += 0.0 if recipe.sequence_parallel else gather_seconds(whole, Group(recipe.tensor), cluster, constants)
    return once, constants.contention if recipe.software.overlap_pipeline else 1.0
