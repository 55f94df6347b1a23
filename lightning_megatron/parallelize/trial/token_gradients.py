"""Refuses, under sequence parallelism, what would leave a gradient that is neither whole nor a partial sum.

A parameter that acts on sequence shards gets a partial gradient, one that acts on the whole sequence a whole one; the
sum over the ranks is right for the first only. A parameter that does both has no right treatment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from lightning_megatron.parallelize.pairs.regions import Region
from lightning_megatron.parallelize.reading.trace import Trace, is_tagged
from lightning_megatron.parallelize.trial.outside import used_directly


def check_gradients(
    module: nn.Module, trace: Trace, regions: Iterable[Region], covered: Callable[[str], bool], dim: int
) -> None:
    """Refuse parameters with mixed gradients, and regions that would send tokens to the wrong rank.

    Args:
        module: the traced module.
        trace: its trace.
        regions: the regions of the trunk.
        covered: whether a parameter of that name belongs to a layer of the trunk.
        dim: the sequence's dim in the hidden state.

    Raises:
        ValueError: naming the parameter or the layer.
    """
    regions = list(regions)
    for name in [*_shared_with_gathered(trace, regions), *_inside_and_outside(module, covered)]:
        raise ValueError(
            f"`sequence_parallel=True`: {name!r} acts on a part of the tokens in one place and on all of them in "
            "another, so that its gradient is neither whole nor a partial sum; turn sequence parallelism off."
        )
    exposed = used_directly(module, trace)
    for name, call in trace.calls.items():
        held = any(id(p) in exposed for p in call.module.parameters(recurse=False))
        if is_tagged(call.module) and held and covered(f"{name}.weight"):
            raise ValueError(
                f"`sequence_parallel=True`: a parameter of {name!r} is used without calling that layer, on what may be "
                "all of the tokens or none; turn sequence parallelism off."
            )
    for region in regions:
        column, row = trace.input_of(region.columns[0]), trace.input_of(region.row)
        if dim == 1 and column.dim() != row.dim():
            raise ValueError(
                f"`sequence_parallel=True`: tokens are flattened between {region.columns[0]!r}, which reads "
                f"{column.dim()} dims, and {region.row!r}, which reads {row.dim()}; turn sequence parallelism off."
            )


def _shared_with_gathered(trace: Trace, regions: list[Region]) -> Iterable[str]:
    """Parameters that act inside gathered regions, where tensors are whole, and elsewhere."""
    gathered = {region.row for region in regions if region.gathered}
    for region in regions:
        for name in region.inner if region.gathered else ():
            if {reader for reader, met in trace.between.items() if name in met} - gathered:
                yield name


def _inside_and_outside(module: nn.Module, covered: Callable[[str], bool]) -> Iterable[str]:
    """Parameters that a layer of the trunk shares with something outside of it."""
    places: dict[int, set[bool]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), set()).add(covered(name))
        if len(places[id(parameter)]) > 1:
            yield name
