"""Length of a pipelined step from the costs of its virtual stages.

A prediction simulates the real schedule. Closed forms of the bubble are used to compare thousands of layouts, or to
predict one layout thousands of times.
"""

from __future__ import annotations

from functools import lru_cache

from lightning_megatron.pipeline.schedules.by_name import make_schedule
from lightning_megatron.pipeline.schedules.dependencies import Costs
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.schedules.simulation import simulate
from lightning_megatron.planner.cost.stages import StageSeconds, rank_costs
from lightning_megatron.planner.model.recipe import VEE_SCHEDULES, Recipe


def closed_form(costs: list[StageSeconds], recipe: Recipe) -> float:
    """Seconds from the first forward to the last backward, from the known bubbles of the schedules.

    The slowest rank computes without pause for all m micro-batches; before and after, one micro-batch passes through
    the other ranks. This gives (m - 1) max T + sum T for GPipe and 1F1B; interleaving divides the time on the other
    ranks by v. Zero-bubble schedules fill the bubble with weight gradients W: (p-1)(F + I - W) remains for ZB-H1 and
    (p-1)(F + I - 2W) for ZB-H2, where I is the input gradient (arXiv 2401.10241). V schedules wait until the forward of
    one chunk has passed through all ranks.
    """
    ranks = rank_costs(costs, recipe)
    totals = [cost.total + 2.0 * cost.flight for cost in ranks]
    busy = recipe.micro_batches * max(cost.total for cost in ranks)
    if recipe.pipeline == 1:
        return busy
    crossing = sum(totals) - max(totals)
    if recipe.schedule in ("gpipe", "1f1b"):
        return busy + crossing
    if recipe.schedule == "interleaved":
        return busy + crossing / recipe.chunks
    if recipe.schedule in VEE_SCHEDULES:
        return busy + sum(cost.forward for cost in ranks) / recipe.chunks
    others = (recipe.pipeline - 1) / recipe.pipeline
    weights = sum(cost.weight_gradient for cost in ranks) * others
    if recipe.schedule == "zb-h1":
        return busy + max(0.0, crossing - 2.0 * weights)
    late_start = 0.0 if recipe.software.post_validation else sum(cost.forward for cost in ranks) * others
    return busy + max(0.0, crossing - 3.0 * weights, late_start)


def simulated(costs: list[StageSeconds], recipe: Recipe) -> float:
    """Seconds from the first forward to the last backward, by simulating the real schedule.

    A pipeline is periodic once it is full. A long step is therefore extrapolated from two short ones, which differ by
    one round of p micro-batches.
    """
    if recipe.pipeline == 1:
        return recipe.micro_batches * sum(cost.total for cost in costs)
    stages, count = recipe.pipeline, recipe.micro_batches
    long = 3 * stages + count % stages
    if count <= long:
        return simulated_in_full(costs, recipe, count)
    longer = simulated_in_full(costs, recipe, long)
    return longer + (count - long) // stages * (longer - simulated_in_full(costs, recipe, long - stages))


def simulated_in_full(costs: list[StageSeconds], recipe: Recipe, micro_batches: int) -> float:
    """Simulated seconds of a step of ``micro_batches`` micro-batches.

    With post-validation, whose ranks do not wait for each other between steps, this is the longest span of one rank.
    """
    schedule = _schedule(recipe.schedule, recipe.pipeline, micro_batches, recipe.chunks)
    times = Costs(
        forward=tuple(cost.forward + 0.5 * cost.transfer for cost in costs),
        backward_input=tuple(cost.input_gradient + 0.5 * cost.transfer for cost in costs),
        backward_weight=tuple(cost.weight_gradient for cost in costs),
        latency=max(cost.flight for cost in costs),
    )
    timeline = simulate(schedule, times)
    return max(timeline.spans) if recipe.software.post_validation else timeline.makespan


@lru_cache(maxsize=64)
def _schedule(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    """The schedule, cached: many layouts share one and differ only in their costs."""
    return make_schedule(name, stages, micro_batches, chunks=chunks)
