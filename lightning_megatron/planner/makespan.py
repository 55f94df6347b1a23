"""Length of a pipelined step from the costs of its stages.

Closed forms of the bubble serve where thousands of layouts are compared; a prediction runs the real schedule.
"""

from __future__ import annotations

from lightning_megatron.planner.recipe import Recipe
from lightning_megatron.planner.stages import StageSeconds


def closed_form(costs: list[StageSeconds], recipe: Recipe) -> float:
    """Seconds from the first forward to the last backward, by the schedules' known bubbles.

    The slowest stage works without pause for all m micro-batches; before and after, one micro-batch crosses the other
    stages: (m - 1) max T + sum T for GPipe and 1F1B, the fill divided by v when interleaved. Zero-bubble schedules put
    weight gradients into the bubble: (p-1)(F + B - W) for ZB-H1, (p-1)(F + B - 2W) for ZB-H2 and none for the V shapes'
    full memory, with B the input gradient's time (arXiv 2401.10241).
    """
    totals = [cost.total for cost in costs]
    slowest = max(totals)
    busy = recipe.micro_batches * slowest
    fill = sum(totals) - slowest
    if recipe.pipeline == 1:
        return busy
    if recipe.schedule in ("gpipe", "1f1b"):
        return busy + fill
    if recipe.schedule == "interleaved":
        return busy + fill / recipe.chunks
    weights = sum(cost.weight_gradient for cost in costs) - costs[totals.index(slowest)].weight_gradient
    if recipe.schedule == "zb-h1":
        return busy + max(0.0, fill - 2.0 * weights)
    return busy + max(0.0, fill - 3.0 * weights)
