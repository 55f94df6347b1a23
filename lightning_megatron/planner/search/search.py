"""Searches all layouts of a model on a number of GPUs for the fastest ones that fit.

The search is exhaustive, except that recomputation, which only costs time, is added only if memory requires it. All
candidates are ranked with closed forms of the bubble; the best are then predicted again with their real schedules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_megatron.planner.cost.context_ranks import deals_heads
from lightning_megatron.planner.cost.makespan import closed_form
from lightning_megatron.planner.cost.prediction import Prediction, predict
from lightning_megatron.planner.model.cluster import Cluster
from lightning_megatron.planner.model.constants import DEFAULT_CONSTANTS, Constants
from lightning_megatron.planner.model.recipe import CONTEXT_METHODS, VEE_SCHEDULES, Recipe
from lightning_megatron.planner.model.shape import ModelShape
from lightning_megatron.planner.model.software import LIGHTNING, Software
from lightning_megatron.planner.search.reasons import explain
from lightning_megatron.planner.search.savings import cheapest_fitting

_REFINED = 12
_MOST_CHUNKS = 12
_LARGEST_MICRO_BATCH = 64
_FEWEST_TOKENS = 4096
_MOST_GPUS = 1_000_000
_MOST_PARAMETERS = 1e18
_FIXED = ("tensor", "pipeline", "micro_batch", "expert", "context")
"""Limits that fix a size."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the search.

    Args:
        schedules: names of the pipeline schedules to try.
        shardings: of the optimizer, or of weights too (``fsdp``, this package's ``weight_sharding=True``), to try.
            Software that does not free weights under a pipeline shards them only without one.
        precision: of the matrix products.
        software: traits of the training stack.
        tensor: fixed tensor-parallel size, or None to try all.
        pipeline: fixed pipeline size, likewise.
        micro_batch: fixed micro-batch size, likewise.
        largest_tensor: largest tensor-parallel size; None means the GPUs of a node.
        sequence_parallel: whether what is between layers may be split along the sequence, over tensor ranks.
        expert: fixed number of ranks that share out the experts of mixtures, likewise.
        imbalance: rows of the busiest of these ranks over the mean.
        context: fixed number of ranks that share the tokens of a sequence; None tries all that leave each of them at
            least 4096 tokens.
        context_methods: of attention over them, to try.
        loss_chunks: whether logits may be computed in pieces where they do not fit whole.
        headroom: share of memory to leave free, as predictions of memory are not exact.
        offload: whether activations and the optimizer may lie in host memory where the layout does not fit otherwise.

    Raises:
        ValueError: ``headroom`` is negative, or 1 or more; a fixed size is below 1.
    """

    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zb-h1", "zb-v")
    shardings: tuple[str, ...] = ("zero1", "none")
    precision: str = "bf16"
    software: Software = LIGHTNING
    tensor: int | None = None
    pipeline: int | None = None
    micro_batch: int | None = None
    largest_tensor: int | None = None
    sequence_parallel: bool = True
    expert: int | None = None
    imbalance: float = 1.0
    context: int | None = None
    context_methods: tuple[str, ...] = CONTEXT_METHODS
    loss_chunks: bool = True
    headroom: float = 0.05
    offload: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.headroom < 1:
            raise ValueError(f"`headroom={self.headroom}` is a share of memory; it must lie in 0 to below 1")
        for name in ("tensor", "pipeline", "micro_batch", "largest_tensor", "expert", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}={value}` must be at least 1; correct `{name}`")


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of a search: layouts ranked by speed.

    Args:
        shape, cluster, gpus: as given.
        global_batch: of the fastest layout, in sequences.
        ranked: predictions of layouts that fit, fastest first.
        considered: number of layouts tried.
        too_large: number of these that do not fit even with full recomputation.
        explanation: why the first is the fastest, and where the second loses time.
    """

    shape: ModelShape
    cluster: Cluster
    gpus: int
    global_batch: int
    ranked: tuple[Prediction, ...]
    considered: int
    too_large: int
    explanation: str

    @property
    def best(self) -> Prediction:
        """The fastest layout that fits."""
        return self.ranked[0]

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data for JSON."""
        return {
            "gpus": self.gpus,
            "gpu": self.cluster.gpu.name,
            "global_batch": self.global_batch,
            "parameters": self.shape.parameters,
            "considered": self.considered,
            "too_large": self.too_large,
            "explanation": self.explanation,
            "layouts": [prediction.as_dict() for prediction in self.ranked],
        }


def plan(
    shape: ModelShape,
    cluster: Cluster,
    gpus: int,
    global_batch: int | None = None,
    *,
    replica_batch: int | None = None,
    limits: Limits | None = None,
    constants: Constants = DEFAULT_CONSTANTS,
    top: int = 10,
) -> Plan:
    """Find the fastest layouts of a model on a number of GPUs.

    Args:
        shape: the model.
        cluster: the machine.
        gpus: number of GPUs; every layout uses all of them.
        global_batch: sequences per optimizer step.
        replica_batch: instead of ``global_batch``, sequences per optimizer step and replica; layouts with more replicas
            then have a larger global batch.
        limits: of the search.
        constants: calibrated constants.
        top: number of layouts to return.

    Raises:
        ValueError: not exactly one of ``global_batch`` and ``replica_batch`` is given, a number is below 1, no layout
            divides, or none fits; the message says what would help.
    """
    if (global_batch is None) == (replica_batch is None):
        raise ValueError("give either `global_batch` or `replica_batch`")
    limits = limits or Limits()
    for name, value in (("gpus", gpus), ("global_batch", global_batch or replica_batch or 0), ("top", top)):
        if value < 1:
            raise ValueError(f"`{name}={value}` must be at least 1; correct `{name}`")
    if gpus > _MOST_GPUS:
        raise ValueError(f"`gpus={gpus}` is over {_MOST_GPUS:,}, for which no layouts are searched; correct `gpus`")
    _check_model(shape, limits)
    considered = too_large = 0
    found: list[Prediction] = []
    for recipe in candidates(shape, cluster, gpus, global_batch, limits, replica_batch):
        considered += 1
        fitting = cheapest_fitting(
            shape, recipe, cluster, limits.headroom, offload=limits.offload, loss_chunks=limits.loss_chunks
        )
        if fitting is None:
            too_large += 1
            continue
        found.append(predict(shape, fitting, cluster, constants=constants, makespan=closed_form))
    if not found:
        raise ValueError(_nothing_found(shape, cluster, gpus, global_batch or replica_batch or 0, considered, limits))
    found.sort(key=_slowness)
    first = itertools.islice(_distinct(found), max(_REFINED, top))
    refined = [predict(shape, item.recipe, cluster, constants=constants) for item in first]
    ranked = tuple(sorted(refined, key=_slowness)[:top])
    least = min(item.recipe.tensor * item.recipe.pipeline * item.recipe.context for item in found)
    text = explain(shape, cluster, ranked, least=least, constants=constants)
    return Plan(shape, cluster, gpus, ranked[0].recipe.global_batch, ranked, considered, too_large, text)


def _check_model(shape: ModelShape, limits: Limits) -> None:
    """Refuse models that nobody means, and limits that they have no use for.

    Raises:
        ValueError: with the size.
    """
    if shape.parameters > _MOST_PARAMETERS:
        raise ValueError(f"a model of {shape.parameters:.1e} parameters is not planned for; correct its sizes")
    if limits.expert and limits.expert > 1 and not shape.experts:
        raise ValueError(f"`expert={limits.expert}` shares out experts, and the model has none; leave it out")


def _distinct(ranked: Iterable[Prediction]) -> Iterator[Prediction]:
    """The predictions but for those that differ from an earlier one in sequence parallelism alone."""
    known = set()
    for item in ranked:
        key = replace(item.recipe, sequence_parallel=False)
        if key not in known:
            known.add(key)
            yield item


def _slowness(prediction: Prediction) -> float:
    """Seconds per token, which also compares layouts with different global batches."""
    return 1.0 / prediction.tokens_per_second


def candidates(
    shape: ModelShape,
    cluster: Cluster,
    gpus: int,
    global_batch: int | None,
    limits: Limits,
    replica_batch: int | None = None,
) -> Iterator[Recipe]:
    """Yield all recipes whose sizes divide the GPUs, the heads, the layers and the batch, without recomputation."""
    largest = limits.largest_tensor or cluster.gpus_per_node
    for tensor in _divisors(gpus, limits.tensor):
        if tensor > largest or not _tensor_divides(shape, tensor):
            continue
        for pipeline in _divisors(gpus // tensor, limits.pipeline):
            if pipeline > shape.layers:
                continue
            for context in _context_sizes(shape, gpus // tensor // pipeline, limits):
                data = gpus // tensor // pipeline // context
                batch = global_batch if replica_batch is None else replica_batch * data
                if not batch or batch % data:
                    continue
                for grid in _grids(shape, Recipe(tensor, pipeline, data, context, 1, batch), limits, cluster):
                    yield from _recipes(shape, grid, limits)


def _context_sizes(shape: ModelShape, ranks: int, limits: Limits) -> list[int]:
    """Numbers of ranks that can share the tokens of a sequence."""
    sizes = _divisors(ranks, limits.context)
    return sizes if limits.context else [size for size in sizes if size == 1 or shape.seq / size >= _FEWEST_TOKENS]


def _grids(shape: ModelShape, sizes: Recipe, limits: Limits, cluster: Cluster) -> Iterator[Recipe]:
    """Yield the recipe of sizes with each number of expert ranks, and each way of attention over context ranks."""
    experts = _expert_sizes(shape, sizes, limits)
    if sizes.context > 1 and len(experts) > 3:  # ways of attention multiply the search
        inside = [size for size in experts if size <= cluster.gpus_per_node]
        experts = sorted({1, inside[-1], experts[-1]})
    for expert in experts:
        for method in limits.context_methods if sizes.context > 1 else ("gather",):
            for heads in _context_heads(sizes, method, cluster.gpus_per_node):
                found = replace(sizes, expert=expert, context_method=method, context_heads=heads)
                if sizes.context == 1 or method != "ulysses" or deals_heads(shape, found):
                    yield found


def _context_heads(sizes: Recipe, method: str, gpus: int) -> list[int | None]:
    """How many context ranks may share the heads: all, and those of a node."""
    inside = gpus // sizes.tensor
    several = method == "ulysses" and 1 < inside < sizes.context and sizes.context % inside == 0
    return [None, inside] if several else [None]


def _expert_sizes(shape: ModelShape, sizes: Recipe, limits: Limits) -> list[int]:
    """Numbers of ranks that can share out the experts; 1 for a dense model."""
    if not shape.experts:
        return [1]
    block = sizes.tensor * sizes.replicas
    if not limits.software.folds_experts:
        block = sizes.data if sizes.tensor * sizes.context == 1 else 1
    return [size for size in _divisors(block, limits.expert) if shape.experts % size == 0]


def _recipes(shape: ModelShape, grid: Recipe, limits: Limits) -> Iterator[Recipe]:
    """Yield the recipes of one choice of the sizes of all axes."""
    tensor, pipeline = grid.tensor, grid.pipeline
    per_replica = grid.global_batch // grid.data
    schedules = list(_schedules(shape, pipeline, limits.schedules))
    sequences = (True, False) if tensor > 1 and limits.sequence_parallel else (limits.sequence_parallel,)
    for micro_batch in _divisors(per_replica, limits.micro_batch):
        if micro_batch > _LARGEST_MICRO_BATCH:
            continue
        for schedule, chunks in schedules:
            for sharding in limits.shardings:
                if grid.replicas == 1 and sharding != limits.shardings[0]:
                    continue  # with one replica all shardings are the same
                if sharding in ("fsdp", "hsdp") and pipeline > 1 and not limits.software.frees_under_pipeline:
                    continue
                for sequence in sequences:
                    yield replace(
                        grid,
                        micro_batch=micro_batch,
                        chunks=chunks,
                        schedule=schedule,
                        sharding=sharding,
                        sequence_parallel=sequence,
                        precision=limits.precision,
                        software=limits.software,
                        imbalance=limits.imbalance,
                    )


def _divisors(number: int, fixed: int | None) -> list[int]:
    """Divisors of ``number``; with a fixed value only this one, if it divides."""
    if fixed is not None:
        return [fixed] if number % fixed == 0 else []
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return small + [number // value for value in reversed(small) if value * value != number]


def _tensor_divides(shape: ModelShape, tensor: int) -> bool:
    """Whether heads and the MLP split evenly over the tensor ranks (key/value heads are split or replicated)."""
    heads = shape.key_value_heads
    shared = heads % tensor == 0 or tensor % heads == 0
    return shape.heads % tensor == 0 and shared and shape.inner % tensor == 0


def _schedules(shape: ModelShape, pipeline: int, allowed: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield (schedule, chunks) for a pipeline size; interleaved chunks must divide the layers."""
    if pipeline == 1:
        yield "1f1b", 1
        return
    for name in allowed:
        if name == "interleaved":
            for chunks in range(2, min(_MOST_CHUNKS, shape.layers // pipeline) + 1):
                slots = pipeline * chunks
                if shape.layers % slots == 0 or (shape.layers + 2) % slots == 0:
                    yield name, chunks
        elif name in VEE_SCHEDULES:
            if shape.layers >= 2 * pipeline:
                yield name, 2
        else:
            yield name, 1


def _nothing_found(
    shape: ModelShape, cluster: Cluster, gpus: int, global_batch: int, considered: int, limits: Limits
) -> str:
    """Error message of a search without result: the reason, and what would help."""
    if limits.tensor and shape.heads % limits.tensor:
        fitting = [size for size in range(1, shape.heads + 1) if shape.heads % size == 0]
        return (
            f"`tensor={limits.tensor}` does not divide heads={shape.heads}; use {', '.join(map(str, fitting[:-1]))} or "
            f"{fitting[-1]}, or another number of heads"
        )
    if limits.expert and shape.experts and shape.experts % limits.expert:
        fitting = [size for size in range(1, shape.experts + 1) if shape.experts % size == 0]
        return (
            f"`expert={limits.expert}` does not share out the model's `experts={shape.experts}` evenly; use "
            f"{', '.join(map(str, fitting[:-1]))} or {fitting[-1]}"
        )
    if not considered:
        fixed = [f"`{name}={getattr(limits, name)}`" for name in _FIXED]
        asked = [text for text in fixed if "None" not in text]
        held = f" with {', '.join(asked)}" if asked else ""
        return (
            f"no layout of `gpus={gpus}`{held} divides heads={shape.heads}, layers={shape.layers} and "
            f"`global_batch={global_batch}`; choose {'other sizes, or ' if asked else ''}a number of GPUs that divides "
            "`global_batch`, or `global_batch` as a multiple of `gpus`"
        )
    least = math.ceil(shape.parameters * 6.0 / cluster.gpu.memory)
    layouts = "the only layout" if considered == 1 else f"none of {considered:,} layouts"
    verb = "does not fit" if considered == 1 else "fits"
    head = f"{layouts} of {shape.size} parameters {verb} on `gpus={gpus}` {cluster.gpu.name}"
    if least > gpus:
        return f"{head}; weights and gradients alone need about {least:,} GPUs, so raise `gpus`, or use larger ones"
    others = [] if limits.offload else ["let host memory be used (`offload`)"]
    others += (
        []
        if gpus == 1 or {"fsdp", "hsdp"} & {*limits.shardings}
        else ["share weights out over replicas (`sharding` fsdp)"]
    )
    others += [f"shorten sequences (`seq={shape.seq}`)", "raise `gpus`"]
    return f"{head}, with activations and the optimizer's state; {', '.join(others)}, or use GPUs with more memory"
