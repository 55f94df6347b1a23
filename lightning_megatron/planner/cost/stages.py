"""What one pipeline stage does for one micro-batch: the layers it owns, and the seconds each part of them takes.

Stages differ: the first has the embedding, the last the output head, and layers seldom divide evenly. The slowest stage
sets the pace of the pipeline, so stages are priced one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_megatron.planner.cost.communication import Group, all_reduce_seconds, gather_seconds, send_seconds
from lightning_megatron.planner.cost.compute import LayerSeconds, accumulation_seconds, head_seconds, layer_seconds
from lightning_megatron.planner.model.cluster import Cluster
from lightning_megatron.planner.model.constants import Constants
from lightning_megatron.planner.model.recipe import VEE_SCHEDULES, Recipe, rank_of
from lightning_megatron.planner.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one virtual stage, or of one rank's virtual stages together, for one micro-batch.

    Args:
        forward, input_gradient, weight_gradient: compute and exposed communication.
        communication: the part of these that is exposed tensor- and context-parallel communication.
        transfer: sends and receives that keep the stage from computing.
        flight: what remains of one transfer, during which others compute.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    communication: float
    transfer: float
    flight: float

    @property
    def total(self) -> float:
        """Forward, backward and transfers."""
        return self.forward + self.input_gradient + self.weight_gradient + self.transfer

    def plus(self, other: StageSeconds) -> StageSeconds:
        """Both stages on one rank."""
        return StageSeconds(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
            self.communication + other.communication,
            self.transfer + other.transfer,
            max(self.flight, other.flight),
        )


def split_layers(layers: int, virtual_stages: int) -> list[int]:
    """Layers per virtual stage, first to last.

    Even where it divides; otherwise the embedding and the head count as a layer each where that divides (62 layers on
    32 stages: 1, 2, 2, ..., 1); otherwise the first virtual stages hold one more.

    Raises:
        ValueError: fewer layers than virtual stages.
    """
    counted = virtual_stages > 1 and (layers + 2) % virtual_stages == 0
    if layers < virtual_stages and not counted:
        raise ValueError(
            f"`layers={layers}` is less than the {virtual_stages} virtual stages; lower `pipeline` or `chunks`"
        )
    if layers % virtual_stages and counted:
        each = (layers + 2) // virtual_stages
        return [each - 1, *[each] * (virtual_stages - 2), each - 1]
    even, rest = divmod(layers, virtual_stages)
    return [even + (1 if stage < rest else 0) for stage in range(virtual_stages)]


def layers_of_ranks(shape: ModelShape, recipe: Recipe) -> list[int]:
    """Layers per pipeline rank, chunks added up."""
    return list(_layers_of_ranks(shape.layers, recipe.pipeline, recipe.chunks, recipe.schedule in VEE_SCHEDULES))


@lru_cache(maxsize=1024)
def _layers_of_ranks(layers: int, pipeline: int, chunks: int, vee: bool) -> tuple[int, ...]:
    """As :func:`layers_of_ranks`; asked for thousands of times with the same few sizes."""
    found = [0] * pipeline
    for stage, count in enumerate(split_layers(layers, pipeline * chunks)):
        found[rank_of(stage, pipeline, vee)] += count
    return tuple(found)


def stage_costs(
    shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants, recompute_share: float
) -> list[StageSeconds]:
    """Price every virtual stage, first to last.

    Args:
        shape, recipe, cluster, constants: what is run, how, and where.
        recompute_share: share of the layers whose forward is repeated in full.
    """
    layer = layer_seconds(shape, recipe, cluster.gpu, constants)
    forward_transfer, backward_transfer = layer_communication(shape, recipe, cluster, constants, layer)
    repeated = _repeated_seconds(recipe, layer, forward_transfer, recompute_share)
    backward_comm = backward_transfer + recompute_share * forward_transfer
    head = head_seconds(shape, recipe, cluster.gpu, constants)
    added = accumulation_seconds(shape.layer_parameters / recipe.tensor, recipe, cluster.gpu, constants)
    added_vocab = accumulation_seconds(shape.vocab * shape.hidden / recipe.tensor, recipe, cluster.gpu, constants)
    per_stage = split_layers(shape.layers, recipe.virtual_stages)
    transfer, exposed = transfer_seconds(shape, recipe, cluster, constants)
    costs = []
    for stage, count in enumerate(per_stage):
        last = float(stage == recipe.virtual_stages - 1)
        ends = last + float(stage == 0)
        costs.append(
            StageSeconds(
                forward=count * (layer.forward + forward_transfer) + last * head[0],
                input_gradient=count * (layer.input_gradient + backward_transfer + repeated) + last * 0.5 * head[1],
                weight_gradient=count * (layer.weight_gradient + added) + last * 0.5 * head[1] + ends * added_vocab,
                communication=count * (forward_transfer + backward_comm),
                transfer=2.0 * exposed * transfer,
                flight=(1.0 - exposed) * transfer,
            )
        )
    return costs


def rank_costs(costs: list[StageSeconds], recipe: Recipe) -> list[StageSeconds]:
    """Costs per pipeline rank: those of its virtual stages added up."""
    found = [StageSeconds(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)] * recipe.pipeline
    for stage, cost in enumerate(costs):
        rank = recipe.rank_of(stage)
        found[rank] = found[rank].plus(cost)
    return found


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


def _tensor_seconds(shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants) -> tuple[float, float]:
    """Exposed seconds of a layer's tensor-parallel collectives: two all-reduces (or gather and scatter) each way."""
    if recipe.tensor == 1:
        return 0.0, 0.0
    size = recipe.element * recipe.micro_batch * shape.seq / recipe.context * shape.hidden
    once = 2.0 * all_reduce_seconds(size, Group(recipe.tensor), cluster, constants)
    hidden = constants.tensor_hidden if recipe.software.overlap_tensor else 0.0
    exposed = once * (1.0 - hidden * (1.0 - constants.contention))
    return exposed, exposed


def _context_seconds(shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants) -> float:
    """Seconds in which a layer's keys and values travel once around the context-parallel ring."""
    if recipe.context == 1:
        return 0.0
    width = 2.0 * shape.key_value_heads * shape.head_size / recipe.tensor
    size = recipe.element * recipe.micro_batch * shape.seq * width
    return gather_seconds(size, Group(recipe.context, recipe.tensor), cluster, constants)


def hidden_cost(transfer: float, compute: float, constants: Constants) -> float:
    """What a transfer costs beside ``compute`` seconds of other work: its overhang, and contention for the rest."""
    return max(0.0, transfer - compute) + constants.contention * min(transfer, compute)


def transfer_seconds(shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants) -> tuple[float, float]:
    """Seconds of one stage-to-stage transfer, and the share of it that keeps a stage from computing.

    Each tensor rank sends its own 1/t of the boundary activation, or all of it where software cannot do that; without
    sequence parallelism the receivers gather the parts. Software that does not overlap transfers waits for all of it.
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
