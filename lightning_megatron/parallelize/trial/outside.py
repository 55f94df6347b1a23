"""What the code outside a region sees of it, and what that forbids.

Splitting a region is right as long as everything of it leaves through the row-parallel sum. Three things can leave
another way: a column's output that the module returns or keeps (activations for a penalty, attention weights), a
parameter that acts inside and outside (its gradient would be a partial sum plus a whole one), and a weight that is
used without calling the layer that holds it. The first two are cured by gathering, the last only by leaving the layer
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from lightning_megatron.parallelize.pairs.regions import Region
from lightning_megatron.parallelize.plan.patterns import generalize
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.trace import Trace
from lightning_megatron.parallelize.trial.detached import read_elsewhere


def seen_outside(module: nn.Module, regions: Iterable[Region], trace: Trace | None) -> set[str]:
    """Columns from whose outputs something is computed that does not go through their row-parallel layer."""
    if trace is None:
        return set()
    groups: dict[Any, list[Region]] = {}
    for region in regions:
        if not region.gathered and not trace.results.intersection(region.columns):
            groups.setdefault((generalize(region.row), *map(generalize, region.columns)), []).append(region)
    return trace.results | read_elsewhere(module, trace, list(groups.values()))


def used_directly(module: nn.Module, trace: Trace | None) -> set[int]:
    """Ids of the parameters that are used without calling the layer (linear, embedding, attention) that holds them."""
    if trace is None:
        return set()
    met = trace.loose.union(*trace.between.values())
    return {id(module.get_parameter(name)) for name in met}


def regather_shared(
    regions: list[Region], trace: Trace | None, gather: Callable[[Region, str], Region]
) -> list[Region]:
    """Gather every region that shares a parameter with code outside regions, until none is left.

    Args:
        regions: settled regions.
        trace: the trace they were read from.
        gather: gathers one region for a reason, or refuses.
    """
    if trace is None:
        return regions
    while True:
        split = {region.row for region in regions if not region.gathered}
        found = [(region, name) for region in regions if not region.gathered for name in _shared(region, trace, split)]
        if not found:
            return regions
        guilty, name = found[0]
        reason = f"{name!r} acts inside it and outside"
        regions = [gather(region, reason) if region is guilty else region for region in regions]


def _shared(region: Region, trace: Trace, split: set[str]) -> Iterable[str]:
    """Parameters and per-head tables of a region that something else than split regions reads."""
    for name in region.inner:
        users = {reader for reader, met in trace.between.items() if name in met}
        if users - split or name in trace.loose:
            yield name
    for name in region.tables:
        if trace.readers(name) - split or name in trace.results:
            yield name


def without_idle_sums(
    styles: Mapping[str, Style], module: nn.Module, regions: Iterable[Region], trace: Trace | None
) -> dict[str, Style]:
    """The styles without gradient sums of modules that, for all that was traced, see whole heads only."""
    split = [region for region in regions if not region.gathered]
    kept: dict[str, Any] = {}
    for name, style in styles.items():
        idle = False
        if trace is not None and name in trace.calls:
            if style is Style.MLA_KV_A_PROJ:
                idle = not any(name in region.others for region in split)
            elif style is Style.REPLICATED_WITH_GRAD_ALLREDUCE:
                own = {id(parameter) for parameter in module.get_submodule(name).parameters()}
                inside = (module.get_parameter(inner) for region in split for inner in region.inner)
                idle = not any(id(parameter) in own for parameter in inside)
        if not idle:
            kept[name] = style
    return kept
