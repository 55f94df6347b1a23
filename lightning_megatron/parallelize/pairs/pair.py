"""Finds pairs of column- and row-parallel layers, from a trace or from the styles of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_megatron.mesh.parts.names import lies_in, parent
from lightning_megatron.parallelize.plan.blueprint import ColumnCut, Door, Region
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.heads import HeadSizes, head_sizes
from lightning_megatron.parallelize.reading.low_rank import is_splittable, sizes_of
from lightning_megatron.parallelize.reading.trace import Trace


def regions_from_trace(module: nn.Module, trace: Trace, excluded: set[str]) -> list[Region]:
    """All regions of a module, each layer in at most one, in execution order.

    Args:
        module: the traced module.
        trace: its trace.
        excluded: names of layers that belong to no region (heads of the vocabulary).
    """
    regions: list[Region] = []
    taken: set[str] = set(excluded)
    for row in trace.sources:
        if row in taken or not is_splittable(trace.calls[row].module):
            continue
        region = _region_before(module, trace, row, taken)
        if region is not None:
            regions.append(region)
            taken.update(region.members)
    return regions


def regions_from_styles(
    module: nn.Module, styles: Mapping[str, Style], trace: Trace | None, strict: bool = True
) -> list[Region]:
    """Regions of a plan that names columns and rows.

    Args:
        module: the traced module.
        styles: style of each module that the plan names.
        trace: its trace, if it could be run.
        strict: whether every split output must be read by a row of the plan.

    Raises:
        ValueError: no row reads the split output of a column, or only one side of a region is gathered.
    """
    named = [name for name, _ in module.named_modules() if name in styles]
    rows = [name for name in named if styles[name].is_row]
    columns = [name for name in named if styles[name].is_column]
    regions, matched = [], set()
    for row in rows:
        if trace is not None and row in trace.sources:
            members = [c for c in trace.sources if c in trace.sources[row] and c in columns]
        else:
            members = _nearest_columns(row, rows, columns, named)
        if not members:
            continue
        matched.update(members)
        region = describe(module, members, row, trace)
        region.gathered = styles[row] is Style.ROWWISE_SPLIT_INPUT
        regions.append(region)
    _check_matched(styles, columns if strict else [], matched, regions)
    return regions


def describe(module: nn.Module, columns: list[str], row: str, trace: Trace | None) -> Region:
    """The region of these layers, with the parameters and tables between them according to the trace."""
    region = Region(columns, row, common_parent([*columns, row]))
    region.cuts = {name: ColumnCut.blocks(sizes_of(module.get_submodule(name))[1]) for name in columns}
    owner = module.get_submodule(parent(columns[0]))
    region.sizes = head_sizes(owner, [sizes_of(module.get_submodule(c))[1] for c in columns])
    if trace is not None and row in trace.sources:
        while region.scope not in trace.calls:
            region.scope = parent(region.scope)
        sources = trace.sources[row]
        sizes = region.sizes
        region.tables = [s for s in sources if sizes is not None and _per_head(trace, s, sizes)]
        region.others = sorted(sources - {*columns, *region.tables})
        region.others += ["the input of the module itself"] if row in trace.on_inputs else []
        own = {id(p) for name in [*region.members, *region.tables] for p in module.get_submodule(name).parameters()}
        region.inner = sorted(name for name in trace.between[row] if id(module.get_parameter(name)) not in own)
    return region


def _region_before(module: nn.Module, trace: Trace, row: str, taken: set[str]) -> Region | None:
    sources = trace.sources[row]
    columns = [s for s in trace.sources if s in sources and is_splittable(trace.calls[s].module)]
    if not columns or taken.intersection(columns) or any(trace.readers(column) != {row} for column in columns):
        return None
    region = describe(module, columns, row, trace)
    return None if region.others else region


def _per_head(trace: Trace, table: str, sizes: HeadSizes) -> bool:
    embedding = trace.calls[table].module
    return isinstance(embedding, nn.Embedding) and embedding.embedding_dim == sizes.heads


def _check_matched(styles: Mapping[str, Style], columns: list[str], matched: set[str], regions: list[Region]) -> None:
    """Check that a row-parallel layer reads every split output, and that both sides agree on whether it is gathered."""
    for name in columns:
        if name not in matched and styles[name] is not Style.COLWISE_GATHER_OUTPUT:
            raise ValueError(
                f"The plan splits the output of {name!r} ({styles[name].value}) but gives no row-parallel layer that "
                "reads it; make that layer 'rowwise', or this one 'colwise_gather_output'."
            )
    for region in regions:
        for name in region.columns:
            gathers = styles[name] is Style.COLWISE_GATHER_OUTPUT
            if gathers != region.gathered:
                wanted = "rowwise_split_input" if gathers else "colwise_gather_output or rowwise for the other"
                raise ValueError(
                    f"The plan gives {name!r} {styles[name].value} and {region.row!r} {styles[region.row].value}, "
                    f"which do not fit together; use {wanted}."
                )


def _nearest_columns(row: str, rows: list[str], columns: list[str], order: list[str]) -> list[str]:
    """Without a trace: the columns under the closest common parent that has any.

    If several rows are equally close, each gets the columns registered between the previous row and itself.
    """
    scope = parent(row)
    while True:
        inside = [c for c in columns if lies_in(parent(c), scope)]
        others = [r for r in rows if r != row and lies_in(parent(r), scope)]
        if inside and not others:
            return inside
        if inside or not scope:
            before = columns_between(inside, others)
            own = order.index(row)
            after = max((order.index(other) for other in others if order.index(other) < own), default=-1)
            return [c for c in before if after < order.index(c) < own] or before
        scope = parent(scope)


def columns_between(columns: list[str], other_rows: list[str]) -> list[str]:
    """Columns that are not closer to another row."""
    return [c for c in columns if all(len(common_parent([c, r])) <= len(common_parent(columns)) for r in other_rows)]


def holder_of(trace: Trace, region: Region) -> Door | None:
    """The module around the columns that was called with the tensor they read, and the arguments with that tensor."""
    holder = parent(region.columns[0])
    if holder not in trace.calls or any(parent(name) != holder for name in region.columns):
        return None
    call, x = trace.calls[holder], trace.input_of(region.columns[0])
    if any(trace.input_of(name) is not x for name in region.columns):
        return None
    places: list[int | str | None] = []
    named: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    for key, value in named:
        inside = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        places += [key if isinstance(value, Tensor) else None] * len(inside)
    found = tuple(k for k, tensor in zip(places, call.tensors, strict=True) if k is not None and tensor is x)
    return (holder, found) if found else None


def common_parent(names: list[str]) -> str:
    """Name of the innermost module that contains all of them."""
    split = [parent(name).split(".") if parent(name) else [] for name in names]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
