"""Tries on a copy of the module whether it can be divided as the planner has chosen, before the run starts.

The planner knows sizes, not code. Whether experts can be shared out, layers split and tokens divided between them is
found out by trials, which the run repeats; a choice that fails them is taken back, and the next best layout is tried.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_megatron.experts.split import ExpertSplit
from lightning_megatron.parallelize import explain
from lightning_megatron.planner import Recipe
from lightning_megatron.strategy.options.options import Options


@dataclass(frozen=True)
class Refused:
    """A choice that the module does not allow.

    Attributes:
        name: of the planner's limit.
        without: its value that takes the choice back.
        called: the choice as an argument of the strategy.
        error: why.
    """

    name: str
    without: Any
    called: str
    error: ValueError


def refused_choice(options: Options, module: nn.Module, recipe: Recipe) -> Refused | None:
    """The first choice of a recipe that the module does not allow; ``None`` if it allows all.

    Args:
        options: of the run.
        module: whole; it does not change.
        recipe: what the planner has chosen.
    """
    shared: Collection[str] = ()
    if recipe.expert > 1:
        try:
            shared = _share_out(options, module, recipe.expert)
        except ValueError as error:
            return Refused("expert", 1, f"expert_parallel_size={recipe.expert}", error)
    if recipe.tensor == 1:
        return None
    why = _split(options, module, recipe, shared, tokens=recipe.sequence_parallel)
    if why is None:
        return None
    without = _split(options, module, recipe, shared, tokens=False) if recipe.sequence_parallel else why
    if without is None:
        return Refused("sequence_parallel", False, "sequence_parallel=True", why)
    return Refused("tensor", 1, f"tensor_parallel_size={recipe.tensor}", without)


def _share_out(options: Options, module: nn.Module, size: int) -> Collection[str]:
    """Names of the experts that are shared out."""
    about: dict[str, Any] = {
        "per_replica": options.balance_of is not None,
        "gathers": options.expert_dispatch == "all_gather",
        "plan": options.expert_parallel_plan,
    }
    return ExpertSplit(module, size, **about).report.split


def _split(
    options: Options, module: nn.Module, recipe: Recipe, shared: Collection[str], *, tokens: bool
) -> ValueError | None:
    """Why layers, and with ``tokens`` what is between them, cannot be split over tensor ranks; ``None`` if they can."""
    try:
        explain(module, recipe.tensor, options.tensor_parallel_plan, tokens, whole=shared)
    except ValueError as error:
        return error
    return None
