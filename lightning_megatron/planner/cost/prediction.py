"""Predicts the time, throughput and memory of one step from the costs of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_megatron.planner.cost.communication import Group, gather_seconds
from lightning_megatron.planner.cost.compute import optimizer_seconds
from lightning_megatron.planner.cost.context_ranks import check_context
from lightning_megatron.planner.cost.host_activations import repeated_share, settled
from lightning_megatron.planner.cost.host_update import update_seconds
from lightning_megatron.planner.cost.makespan import simulated
from lightning_megatron.planner.cost.memory import (
    Memory,
    expert_parameters,
    host_taken,
    peak_memory,
    recompute_share,
    stage_parameters,
    updated_parameters,
)
from lightning_megatron.planner.cost.mixture import check_experts
from lightning_megatron.planner.cost.sharded_state import sharded_seconds, shards
from lightning_megatron.planner.cost.stages import StageSeconds, hidden_cost, rank_costs, stage_costs
from lightning_megatron.planner.model.cluster import GIB, Cluster
from lightning_megatron.planner.model.constants import DEFAULT_CONSTANTS, Constants
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape

Makespan = Callable[[list[StageSeconds], Recipe], float]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one optimizer step by kind, on the slowest stage; the sum is the time of the step.

    Args:
        compute: matrix products, attention and memory passes, with recomputation.
        tensor_communication: exposed tensor-parallel collectives.
        pipeline_bubble: idle time of the slowest stage.
        pipeline_transfer: exposed sends and receives between stages.
        data_communication: exposed gradient reduction and all-gathers of parameters.
        optimizer: gradient norm and weight update.
        other: fixed host time per step, and waiting for the slowest rank.
        expert_communication: rows of tokens sent to experts and back.
        context_communication: exposed messages between context ranks.
    """

    compute: float
    tensor_communication: float
    pipeline_bubble: float
    pipeline_transfer: float
    data_communication: float
    optimizer: float
    other: float
    expert_communication: float = 0.0
    context_communication: float = 0.0

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
            + self.expert_communication
            + self.context_communication
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time, throughput and memory of a run.

    Args:
        recipe: of the run.
        breakdown: seconds of a step by kind.
        memory: peak bytes of the fullest rank by kind.
        capacity: memory of a GPU in bytes.
        host_capacity: memory of the host in bytes per GPU.
        causal_mfu: ``mfu`` with half of the score matrix of attention, as papers on long sequences count it.
        tokens_per_second: of the whole cluster.
        model_tflops: model TFLOP/s per GPU (forward and backward, with the full score matrix of attention).
        hardware_tflops: the same with recomputed FLOPs.
        mfu, hfu: ``model_tflops`` and ``hardware_tflops`` over the datasheet peak at the run's precision.
        recomputed: share of layers that are fully recomputed.
        remarks: assumptions.
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
    host_capacity: float = math.inf
    causal_mfu: float = 0.0

    @property
    def iteration_seconds(self) -> float:
        """Seconds of one optimizer step."""
        return self.breakdown.total

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's peak is within the GPU's memory, and its part of the host's memory too."""
        return self.memory.total <= self.capacity and self.memory.host <= self.host_capacity

    def as_dict(self) -> dict[str, Any]:
        """The prediction as plain data for JSON: seconds, GiB, TFLOP/s."""
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
            "causal_mfu": self.causal_mfu,
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
        layout: the recipe.
        cluster: the machine.
        constants: calibrated constants.
        makespan: computes the seconds of all forwards and backwards from the costs of the virtual stages.
        remarks: assumptions, copied to the prediction.

    Raises:
        ValueError: the recipe does not fit the model or the GPU (fewer layers than stages, no 8-bit products).
    """
    check_experts(shape, layout)
    check_context(shape, layout)
    layout = settled(shape, layout, cluster, constants, host_taken(shape, layout, cluster))
    if layout.sharding == "hsdp":
        layout = replace(layout, shard=shards(layout, cluster.gpus_per_node))
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
        host_capacity=cluster.host_share(layout.world),
        causal_mfu=model * shape.causal_flops_per_token / shape.model_flops_per_token / peak,
    )


def repeated_flops_per_token(shape: ModelShape, recipe: Recipe, share: float) -> float:
    """FLOPs per token of recomputation, which are not model FLOPs.

    Args:
        shape: the model.
        recipe: of the run.
        share: share of layers that are fully recomputed.
    """
    added = share * shape.layer_flops_per_token
    added += repeated_share(recipe) * (shape.layer_flops_per_token - shape.attention_core_flops_per_token)
    if recipe.recompute != "selective" or recipe.software.block_recompute:
        return added
    return added + shape.attention_core_flops_per_token


def _breakdown(
    shape: ModelShape, recipe: Recipe, cluster: Cluster, constants: Constants, costs: list[StageSeconds], span: float
) -> Breakdown:
    """Split the seconds of a step by kind; ``span`` is the time of its forwards and backwards."""
    slowest = max(costs, key=lambda cost: cost.total)
    count = recipe.micro_batches
    stages = sorted({0, min(1, recipe.pipeline - 1), recipe.pipeline - 1})
    stages = stages if shape.experts else [0, recipe.pipeline - 1]
    fullest = max(stages, key=lambda stage: stage_parameters(shape, recipe, stage))
    parameters, experts = stage_parameters(shape, recipe, fullest), expert_parameters(shape, recipe, fullest)
    layers = shape.layers / recipe.pipeline
    if recipe.expert > 1:
        data = _data_seconds(recipe, cluster, constants, slowest, parameters - experts, layers)
        data += _expert_data_seconds(recipe, cluster, constants, slowest, experts)
    else:
        data = _data_seconds(recipe, cluster, constants, slowest, parameters, layers)
    updated = updated_parameters(parameters, recipe, cluster, experts)
    away = recipe.optimizer_offload * updated
    optimizer = optimizer_seconds(updated - away, cluster.gpu, constants)
    optimizer += update_seconds(away, recipe, cluster) if away else 0.0
    counted = span + data + optimizer
    spread = constants.jitter * math.log2(recipe.world) * counted
    communication = count * slowest.communication
    transfer = count * slowest.transfer
    return Breakdown(
        compute=count * (slowest.total - slowest.transfer - slowest.exchange - slowest.context) - communication,
        tensor_communication=communication,
        pipeline_bubble=span - count * slowest.total,
        pipeline_transfer=transfer,
        data_communication=data,
        optimizer=optimizer,
        other=constants.step + spread,
        expert_communication=count * slowest.exchange,
        context_communication=count * slowest.context,
    )


def _expert_data_seconds(
    recipe: Recipe, cluster: Cluster, constants: Constants, stage: StageSeconds, parameters: float
) -> float:
    """Exposed seconds of the reduction of experts' gradients over the ranks that hold the same ones."""
    if recipe.expert_copies == 1:
        return 0.0
    group = Group(recipe.expert_copies, recipe.expert)
    reduce = gather_seconds(recipe.bytes_per_gradient * parameters, group, cluster, constants)
    gather = gather_seconds(recipe.element * parameters, group, cluster, constants)
    if not recipe.software.overlap_data:
        return reduce + gather
    backward = stage.input_gradient + stage.weight_gradient
    return hidden_cost(reduce, backward, constants) + hidden_cost(gather, stage.forward, constants)


def _data_seconds(
    recipe: Recipe, cluster: Cluster, constants: Constants, stage: StageSeconds, parameters: float, layers: float
) -> float:
    """Exposed seconds of gradient reduction and all-gathers of parameters in one step."""
    if recipe.replicas == 1:
        return 0.0
    if recipe.shards_weights:
        return sharded_seconds(recipe, cluster, constants, stage, parameters, layers)
    group = Group(recipe.replicas, recipe.tensor)
    reduce = gather_seconds(recipe.bytes_per_gradient * parameters, group, cluster, constants)
    gather = gather_seconds(recipe.element * parameters, group, cluster, constants)
    if not recipe.software.overlap_data:
        return reduce + gather
    window = 1.0 - 1.0 / (layers + 1.0)
    backward = stage.input_gradient + stage.weight_gradient
    return hidden_cost(reduce, window * backward, constants) + hidden_cost(gather, window * stage.forward, constants)
