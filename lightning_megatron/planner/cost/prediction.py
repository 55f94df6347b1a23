"""One step's time, throughput and memory, put together from its parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lightning_megatron.planner.cost.communication import Group, all_reduce_seconds, gather_seconds
from lightning_megatron.planner.cost.compute import optimizer_seconds
from lightning_megatron.planner.cost.makespan import simulated
from lightning_megatron.planner.cost.memory import Memory, peak_memory, recompute_share, stage_parameters
from lightning_megatron.planner.cost.stages import StageSeconds, hidden_cost, rank_costs, stage_costs
from lightning_megatron.planner.model.cluster import GIB, Cluster
from lightning_megatron.planner.model.constants import DEFAULT_CONSTANTS, Constants
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape

Makespan = Callable[[list[StageSeconds], Recipe], float]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one optimizer step by what they are spent on, on the slowest stage; they add up to the step.

    Args:
        compute: products, attention, passes over memory, recomputation included.
        tensor_communication: exposed tensor- and context-parallel collectives.
        pipeline_bubble: waiting of the slowest stage at both ends of the step.
        pipeline_transfer: exposed sends and receives between stages.
        data_communication: exposed gradient reduction and parameter gathering.
        optimizer: gradient norm and weight update.
        other: fixed host work per step and the spread between ranks.
    """

    compute: float
    tensor_communication: float
    pipeline_bubble: float
    pipeline_transfer: float
    data_communication: float
    optimizer: float
    other: float

    @property
    def total(self) -> float:
        """Seconds of one step."""
        return (
            self.compute
            + self.tensor_communication
            + self.pipeline_bubble
            + self.pipeline_transfer
            + self.data_communication
            + self.optimizer
            + self.other
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a run is expected to do.

    Args:
        recipe: the run.
        breakdown: seconds of a step by kind.
        memory: peak bytes of the fullest rank by kind.
        capacity: bytes of a GPU.
        tokens_per_second: of the whole cluster.
        model_tflops: model TFLOP/s per GPU (forward and backward, attention counted in full).
        hardware_tflops: the same with recomputed FLOPs.
        mfu, hfu: these over the datasheet peak at the run's precision.
        recomputed: share of layers recomputed in full.
        remarks: assumptions made on the way.
    """

    recipe: Recipe
    breakdown: Breakdown
    memory: Memory
    capacity: float
    tokens_per_second: float
    model_tflops: float
    hardware_tflops: float
    mfu: float
    hfu: float
    recomputed: float
    remarks: tuple[str, ...] = ()

    @property
    def iteration_seconds(self) -> float:
        """Seconds of one optimizer step."""
        return self.breakdown.total

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's peak is within the GPU's memory."""
        return self.memory.total <= self.capacity

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON: seconds, GiB, TFLOP/s."""
        memory = {name: round(value / GIB, 3) for name, value in asdict(self.memory).items()}
        return {
            "layout": self.recipe.describe(),
            "iteration_seconds": self.iteration_seconds,
            "seconds": {name: round(value, 6) for name, value in asdict(self.breakdown).items()},
            "tokens_per_second": self.tokens_per_second,
            "model_tflops_per_gpu": self.model_tflops,
            "hardware_tflops_per_gpu": self.hardware_tflops,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "memory_gib": {**memory, "total": round(self.memory.total / GIB, 3)},
            "capacity_gib": round(self.capacity / GIB, 3),
            "fits": self.fits,
            "recomputed_share": self.recomputed,
            "remarks": list(self.remarks),
        }


def predict(
    shape: ModelShape,
    layout: Recipe,
    cluster: Cluster,
    *,
    constants: Constants = DEFAULT_CONSTANTS,
    makespan: Makespan = simulated,
    remarks: tuple[str, ...] = (),
) -> Prediction:
    """Predict time, throughput and memory of one optimizer step.

    Args:
        shape: the model.
        layout: how it is run.
        cluster: the machine.
        constants: calibrated efficiencies.
        makespan: how stage costs become the length of the pipelined part.
        remarks: assumptions to carry along.

    Raises:
        ValueError: the model cannot be cut this way (fewer layers than stages, 8-bit on a GPU without it).
    """
    share = recompute_share(shape, layout, cluster)
    costs = stage_costs(shape, layout, cluster, constants, share)
    breakdown = _breakdown(shape, layout, cluster, constants, rank_costs(costs, layout), makespan(costs, layout))
    memory = peak_memory(shape, layout, cluster, share)
    tokens = layout.global_batch * shape.seq
    seconds = breakdown.total
    model = shape.model_flops_per_token * tokens / seconds / layout.world
    hardware = (shape.model_flops_per_token + repeated_flops_per_token(shape, layout, share)) * tokens
    hardware = hardware / seconds / layout.world
    peak = cluster.gpu.peak(layout.precision)
    return Prediction(
        recipe=layout,
        breakdown=breakdown,
        memory=memory,
        capacity=cluster.gpu.memory,
        tokens_per_second=tokens / seconds,
        model_tflops=model / 1e12,
        hardware_tflops=hardware / 1e12,
        mfu=model / peak,
        hfu=hardware / peak,
        recomputed=share,
        remarks=remarks,
    )


def repeated_flops_per_token(shape: ModelShape, recipe: Recipe, share: float) -> float:
    """FLOPs per token that recomputation adds to the model's."""
    added = share * shape.layer_flops_per_token
    if recipe.recompute != "selective" or recipe.software.block_recompute:
        return added
    return added + shape.attention_core_flops_per_token


def _breakdown(
    shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants, costs: list[StageSeconds], span: float
) -> Breakdown:
    """Split a step's seconds by kind."""
    slowest = max(costs, key=lambda cost: cost.total)
    count = recipe.micro_batches
    parameters = max(stage_parameters(shape, recipe, stage) for stage in (0, recipe.pipeline - 1))
    data = _data_seconds(recipe, cluster, constants, slowest, parameters, shape.layers / recipe.pipeline)
    updated = parameters / (1 if recipe.sharding == "none" else _shards(recipe, cluster))
    optimizer = optimizer_seconds(updated, cluster.gpu, constants)
    counted = span + data + optimizer
    spread = constants.jitter * math.log2(recipe.world) * counted
    communication = count * slowest.communication
    transfer = count * slowest.transfer
    return Breakdown(
        compute=count * (slowest.total - slowest.transfer) - communication,
        tensor_communication=communication,
        pipeline_bubble=span - count * slowest.total,
        pipeline_transfer=transfer,
        data_communication=data,
        optimizer=optimizer,
        other=constants.step + spread,
    )


def _shards(recipe: Recipe, cluster: Cluster) -> int:
    """Parts into which optimizer state is divided."""
    if recipe.sharding != "hsdp":
        return recipe.replicas
    return min(recipe.replicas, max(1, cluster.gpus_per_node // recipe.tensor))


def _data_seconds(
    recipe: Recipe, cluster: Cluster, constants: Constants, stage: StageSeconds, parameters: float, layers: float
) -> float:
    """Exposed seconds of gradient reduction and parameter gathering in one step."""
    if recipe.replicas == 1:
        return 0.0
    if recipe.sharding in ("fsdp", "hsdp") and recipe.pipeline == 1:
        return _sharded_weights_seconds(recipe, cluster, constants, stage, parameters, layers)
    group = Group(recipe.replicas, recipe.tensor)
    reduce = gather_seconds(recipe.bytes_per_gradient * parameters, group, cluster, constants)
    gather = gather_seconds(recipe.element * parameters, group, cluster, constants)
    if not recipe.software.overlap_data:
        return reduce + gather
    window = 1.0 - 1.0 / (layers + 1.0)
    backward = stage.input_gradient + stage.weight_gradient
    return hidden_cost(reduce, window * backward, constants) + hidden_cost(gather, window * stage.forward, constants)


def _sharded_weights_seconds(
    recipe: Recipe, cluster: Cluster, constants: Constants, stage: StageSeconds, parameters: float, layers: float
) -> float:
    """Exposed seconds of FSDP in one step: weights gathered for every forward and backward, gradients scattered."""
    group = Group(_shards(recipe, cluster), recipe.tensor, 1 if recipe.software.single_adapter else None)
    gather = gather_seconds(recipe.element * parameters, group, cluster, constants, pieces=layers)
    scatter = gather_seconds(recipe.bytes_per_gradient * parameters, group, cluster, constants, pieces=layers)
    backward = stage.input_gradient + stage.weight_gradient
    window = 1.0 - 1.0 / (layers + 1.0)
    per_pass = hidden_cost(gather, window * stage.forward, constants)
    per_pass += hidden_cost(gather + scatter, window * backward, constants)
    total = recipe.micro_batches * per_pass
    if recipe.sharding == "hsdp" and recipe.replicas > group.size:
        copies = Group(recipe.replicas // group.size, cluster.gpus_per_node)
        total += hidden_cost(
            all_reduce_seconds(2.0 * parameters / group.size, copies, cluster, constants), window * backward, constants
        )
    return total
