"""Proposes ways to cut a region for trial: its packed parts, its attributes, its arguments.

Attention code reads its sizes from attributes (``num_heads``, ``split_size``, ``embed_dim``, ...) or from shapes of its
inputs. Attributes with a number of heads or a width must have the local value after the split; trials of the proposals
show which of them the code uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from lightning_megatron.mesh.parts.names import parent
from lightning_megatron.parallelize.pairs.pair import holder_of
from lightning_megatron.parallelize.plan.blueprint import ColumnCut, Region
from lightning_megatron.parallelize.reading.heads import GROUPS, KEY_VALUE, HeadSizes, head_arguments
from lightning_megatron.parallelize.reading.low_rank import sizes_of
from lightning_megatron.parallelize.reading.trace import Trace

_NO_WIDTHS = r"vocab|_idx|_id$|position|head_dim|(?<!all_)head_size|d_kv|d_head|key_value_proj_dim"


def proposals(module: nn.Module, region: Region, parts: int, packed: bool | None) -> Iterator[dict[str, ColumnCut]]:
    """Ways to cut the columns, simplest first.

    Args:
        module: the module.
        region: columns and row.
        parts: size of the tensor group.
        packed: whether columns hold packed parts; None to propose both.
    """
    outs = {name: sizes_of(module.get_submodule(name))[1] for name in region.columns}
    found: list[dict[str, ColumnCut]] = []
    if not packed:
        found.append({name: ColumnCut.blocks(out) for name, out in outs.items()})
        if region.sizes is not None:
            found.insert(0, {name: _by_heads(out, region.sizes, parts) for name, out in outs.items()})
    if packed is not False:
        if region.sizes is not None and len(outs) == 1:
            found += [{n: cut} for n, out in outs.items() if (cut := _fused(out, region.sizes, parts)) is not None]
        inner = sizes_of(module.get_submodule(region.row))[0]
        found += [{n: ColumnCut.blocks(*([out] if out == inner else [out // 2] * 2)) for n, out in outs.items()}]
        found += [
            {name: ColumnCut.blocks(*[out // n] * n) for name, out in outs.items()}
            for n in (2, 3)
            if all(out % n == 0 for out in outs.values())
        ]
    for i, cuts in enumerate(found):
        if (
            cuts not in found[:i]
            and all(sum(cuts[n].segments) == out for n, out in outs.items())
            and all(cut.fits(parts) for cut in cuts.values())
        ):
            yield cuts


def _by_heads(out: int, sizes: HeadSizes, parts: int) -> ColumnCut:
    """Cut of a separate projection: blocks, or chosen heads if the key/value heads are not divisible by ``parts``."""
    scarce = sizes.key_value != sizes.heads and sizes.key_value % parts != 0
    if scarce and out == sizes.key_value * sizes.size:
        return ColumnCut((out,), (sizes,))
    return ColumnCut.blocks(out)


def _fused(out: int, sizes: HeadSizes, parts: int) -> ColumnCut | None:
    """Cut of a projection that packs query, key and value; None if its size does not match."""
    query, narrow = sizes.heads * sizes.size, sizes.key_value * sizes.size
    if out != query + 2 * narrow:
        return None
    scarce = sizes if sizes.key_value % parts else None
    return ColumnCut((query, narrow, narrow), (None, scarce, scarce))


def candidates(
    module: nn.Module, region: Region, cuts: dict[str, ColumnCut], parts: int, trace: Trace
) -> Iterator[Region]:
    """Regions with these cuts, each with one choice of local attributes and sliced arguments, fewest changes first."""
    call, holder = trace.calls[region.scope], holder_of(trace, region)
    arguments = {} if region.sizes is None else head_arguments(call, region.sizes.heads)
    choices = [{}, arguments, *({key: way} for key, way in arguments.items())]  # a batch may be as large as the heads
    owners = {parent(name): module.get_submodule(parent(name)) for name in region.columns}
    widths = {sizes_of(module.get_submodule(region.row))[0]}
    for cut in cuts.values():
        widths |= {size for size, chosen in zip(cut.segments, cut.chosen, strict=True) if not chosen}
    read = len(region.sizes.read_by(parts, 0)) if region.sizes is not None else 1
    for narrowed in (None, holder) if holder is not None else (None,):
        for attributes in local_attributes(owners, region.sizes, widths, parts, read):
            for chosen in [c for i, c in enumerate(choices) if c not in choices[:i]]:
                yield replace(region, cuts=cuts, attributes=attributes, arguments=chosen, narrowed=narrowed)


def local_attributes(
    owners: Mapping[str, nn.Module], sizes: HeadSizes | None, widths: set[int], parts: int, read: int
) -> list[dict[tuple[str, str], int]]:
    """Sets of attributes that may need local values, fewest changes first.

    Args:
        owners: modules whose code runs between the column- and row-parallel layers, by name.
        sizes: attention sizes, if any.
        widths: logical widths that become ``width / parts``.
        parts: size of the tensor group.
        read: key/value heads per rank.

    Returns:
        Each a table (module name, attribute) -> local value.
    """
    ratios: dict[tuple[str, str], int] = {}
    heads: dict[tuple[str, str], int] = {}
    wide: dict[tuple[str, str], int] = {}
    for name, owner in owners.items():
        for attribute, value in _integers(owner):
            local = _local_heads(attribute, value, sizes, parts, read)
            if local == value:
                continue
            if local is not None:
                (ratios if attribute in GROUPS else heads)[name, attribute] = local
            elif value in widths and value % parts == 0 and not re.search(_NO_WIDTHS, attribute):
                wide[name, attribute] = value // parts
    plain: list[dict[tuple[str, str], int]] = [{}, heads, wide, heads | wide]
    options = [*(ratios | option for option in plain), *plain]  # a masked batch may take a path that was not tried
    for key, value in _unnamed(owners, widths, parts).items() if not heads else ():
        options += [{key: value}, {key: value} | wide]
    return [option for i, option in enumerate(options) if option not in options[:i]]


def _unnamed(owners: Mapping[str, nn.Module], widths: set[int], parts: int) -> dict[tuple[str, str], int]:
    """Attributes that may be a number of heads although their names do not suggest it (``self.h``)."""
    return {
        (name, attribute): value // parts
        for name, owner in owners.items()
        for attribute, value in _integers(owner)
        if value not in widths
        and value % parts == 0
        and all(width % value == 0 for width in widths)
        and not re.search(_NO_WIDTHS, attribute)
    }


def _local_heads(attribute: str, value: int, sizes: HeadSizes | None, parts: int, read: int) -> int | None:
    if attribute in GROUPS:
        return None if sizes is None or value != sizes.heads // sizes.key_value else sizes.heads // parts // read
    if attribute in KEY_VALUE or (sizes is not None and "kv" in attribute and value == sizes.key_value):
        return None if sizes is None or value != sizes.key_value else read
    if "head" in attribute and not re.search(r"dim|size", attribute):
        if sizes is not None and value == sizes.heads:
            return value // parts
        return value // parts if sizes is None and value % parts == 0 else None
    return None


def _integers(owner: nn.Module) -> list[tuple[str, int]]:
    skipped = {"in_features", "out_features", "nf", "nx", "layer_idx", "layer_id"}
    return [
        (name, value)
        for name, value in vars(owner).items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 1 and name not in skipped
    ]
