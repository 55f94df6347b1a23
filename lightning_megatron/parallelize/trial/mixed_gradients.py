"""Refuses parameters whose gradient is neither whole nor a partial sum on sequence shards.

A parameter that acts on sequence shards gets a partial gradient, a parameter that acts on the whole sequence a whole
one, and the sum over the ranks is right for the former only. Parameters that act on both are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from lightning_megatron.parallelize.plan.blueprint import Region
from lightning_megatron.parallelize.reading.trace import Trace, is_tagged
from lightning_megatron.parallelize.trial.readers import used_directly


def mixed(name: str) -> str:
    """The message about a parameter whose whole gradient is no sum over ranks."""
    return (
        f"`sequence_parallel=True`: {name!r} acts on a part of the tokens in one place and on all of them in "
        "another, so that its gradient is neither whole nor a partial sum; turn sequence parallelism off."
    )


def check_gradients(
    module: nn.Module, trace: Trace, regions: Iterable[Region], covered: Callable[[str], bool], dim: int
) -> None:
    """Refuse parameters whose gradient is partly whole, and regions that would send tokens to the wrong rank.

    Args:
        module: the traced module.
        trace: its trace.
        regions: the regions of the trunk.
        covered: whether a parameter of that name belongs to a layer of the trunk.
        dim: dim of the sequence in the hidden state.

    Raises:
        ValueError: there is such a parameter or region; the message names it.
    """
    regions = list(regions)
    for name in [*_shared_with_gathered(trace, regions), *_inside_and_outside(module, covered)]:
        raise ValueError(mixed(name))
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
    """Parameters that are used inside gathered regions, where tensors are whole, and elsewhere."""
    gathered = {region.row for region in regions if region.gathered}
    for region in regions:
        for name in region.inner if region.gathered else ():
            if {reader for reader, met in trace.between.items() if name in met} - gathered:
                yield name


def _inside_and_outside(module: nn.Module, covered: Callable[[str], bool]) -> Iterable[str]:
    """Parameters that a layer of the trunk shares with a module outside of the trunk."""
    places: dict[int, set[bool]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), set()).add(covered(name))
        if len(places[id(parameter)]) > 1:
            yield name
