"""Layers of each pipeline stage, and the micro-batches whose activations it holds."""

from __future__ import annotations

import itertools
from functools import lru_cache

from lightning_megatron.planner.model.recipe import VEE_SCHEDULES, Recipe, rank_of
from lightning_megatron.planner.model.shape import ModelShape


def split_layers(layers: int, virtual_stages: int) -> list[int]:
    """Layers per virtual stage, first to last.

    All stages get the same number if that divides. Otherwise the embedding and the head count as a layer each if that
    divides (62 layers on 32 stages: 1, 2, 2, ..., 1). Otherwise the first virtual stages get one layer more.

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
    """Layers per pipeline rank, over all its chunks."""
    return list(_layers_of_ranks(shape.layers, recipe.pipeline, recipe.chunks, recipe.schedule in VEE_SCHEDULES))


def mixtures_of_stages(shape: ModelShape, recipe: Recipe) -> list[int]:
    """Layers per virtual stage that are mixtures of experts, first to last."""
    ends = [0, *itertools.accumulate(split_layers(shape.layers, recipe.virtual_stages))]
    return [shape.mixtures_among(first, last) for first, last in itertools.pairwise(ends)]


def mixtures_of_ranks(shape: ModelShape, recipe: Recipe) -> list[int]:
    """Layers per pipeline rank, over all its chunks, that are mixtures of experts."""
    found = [0] * recipe.pipeline
    if shape.experts:
        for stage, count in enumerate(mixtures_of_stages(shape, recipe)):
            found[recipe.rank_of(stage)] += count
    return found


@lru_cache(maxsize=1024)
def _layers_of_ranks(layers: int, pipeline: int, chunks: int, vee: bool) -> tuple[int, ...]:
    """Cached :func:`layers_of_ranks`: a search calls it thousands of times with the same few sizes."""
    found = [0] * pipeline
    for stage, count in enumerate(split_layers(layers, pipeline * chunks)):
        found[rank_of(stage, pipeline, vee)] += count
    return tuple(found)


def in_flight(recipe: Recipe, stage: int) -> float:
    """Largest number of micro-batches whose activations ``stage`` holds at once; a chunk counts as 1/v.

    The numbers are those of the schedules, with which the tests compare them. If m is below p, or not a multiple of p
    with interleaving, they are too large by at most one micro-batch.
    """
    stages, chunks, count = recipe.pipeline, recipe.chunks, recipe.micro_batches
    if stages == 1:
        return 1.0
    if recipe.schedule == "gpipe":
        return float(count)
    if recipe.schedule == "1f1b":
        return float(min(stages - stage, count))
    if recipe.schedule == "interleaved":
        ragged = chunks - 1 if count % stages else 0
        warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1 + ragged
        return min(warm_up / chunks, float(count))
    most = {"zb-h1": stages, "zb-h2": 2 * stages - 1, "zb-v": stages, "dualpipe-v": stages + 0.5}
    return float(min(most[recipe.schedule], count))
