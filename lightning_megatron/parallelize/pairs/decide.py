"""Turns a plan into decisions, before the module is changed: the style of every module, and the cuts of all regions.

Sources of a plan, in order: the argument; the plan that a Hugging Face model defines; drop-in layers in the module; and
rules that read a trace. For every source, the cuts of a region are chosen by trying each proposal (see
`lightning_megatron.parallelize.trial.terms`), if the module could be run on a tiny input.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_megatron.mesh.messages.collectives import check_divisible
from lightning_megatron.mesh.parts.names import Parts, lies_in, parent
from lightning_megatron.parallelize.pairs.cut import candidates, proposals
from lightning_megatron.parallelize.pairs.pair import common_parent, regions_from_styles, regions_from_trace
from lightning_megatron.parallelize.pairs.vocabulary import split_vocabulary, vocabulary_heads
from lightning_megatron.parallelize.plan.blueprint import Blueprint, ColumnCut, Region
from lightning_megatron.parallelize.plan.patterns import generalize
from lightning_megatron.parallelize.plan.source import check_styles, styles_of
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.divisible import divisible
from lightning_megatron.parallelize.reading.heads import tensor_arguments
from lightning_megatron.parallelize.reading.hooked import hooked_inside
from lightning_megatron.parallelize.reading.inputs import run_examples
from lightning_megatron.parallelize.reading.kinds import is_attention
from lightning_megatron.parallelize.reading.left_out import leaves_entries_out
from lightning_megatron.parallelize.reading.low_rank import sizes_of, splits_like_linear, structure_of
from lightning_megatron.parallelize.reading.study import Rename, Study
from lightning_megatron.parallelize.trial.readers import (
    holds,
    regather_shared,
    seen_outside,
    used_directly,
    without_idle_sums,
)
from lightning_megatron.parallelize.trial.terms import Bench


def draw_up(
    module: nn.Module,
    parts: int,
    plan: str | Mapping[str, str],
    example: Any = None,
    whole: Collection[str] = (),
    by_views: bool = True,
) -> Blueprint:
    """Decide how a module is split over ``parts`` ranks; the module does not change.

    Args:
        module: a module that is not split yet, with real parameters or on the meta device.
        parts: size of the tensor group.
        plan: ``"auto"``, or pattern -> style.
        example: input for the trace; guessed by default.
        whole: names of modules that are divided by other means; none of their layers is split.
        by_views: whether views between the layers may be given sizes of one rank (see ``split_views``).

    Returns:
        The decisions, with the trace.

    Raises:
        ValueError: the plan does not fit the module, or no plan can be made; the message says what to change.
    """
    trace, untraced = run_examples(module, example)
    source, styles = styles_of(module, plan)
    styles = _without(styles, whole, source)
    blueprint = Blueprint(source, styles, trace=trace, untraced=untraced, by_views=by_views)
    blueprint.heads = vocabulary_heads(module, styles, trace)
    if source == "rules":
        _apply_rules(module, blueprint, parts, Parts(whole))
    else:
        check_styles(module, styles)
        _leave_whole_if_used_directly(module, blueprint)
        inner = {n: s for n, s in styles.items() if n not in blueprint.heads}
        regions = regions_from_styles(module, inner, trace, strict=source != "hugging face")
        ends = {name for region in regions for name in region.columns}
        unread = [name for name, style in inner.items() if style.is_column and name not in ends]
        blueprint.styles |= dict.fromkeys(unread, Style.COLWISE_GATHER_OUTPUT)
        if source == "hugging face":  # heads of odd vocabularies, to which adapters add; others are padded
            for name in unread:
                if sizes_of(module.get_submodule(name))[1] % parts:
                    del blueprint.styles[name]
        blueprint.regions = _without_forks(blueprint, regions)
    _settle_regions(module, blueprint, parts)
    split_vocabulary(module, blueprint)
    blueprint.styles = without_idle_sums(blueprint.styles, module, blueprint.regions, trace)
    cuts = {name: divisible(module.get_submodule(name)) for name in blueprint.styles}
    blueprint.products = {name: cut for name, cut in cuts.items() if cut is not None}
    return blueprint


def _without(styles: dict[str, Style], whole: Collection[str], source: str) -> dict[str, Style]:
    """The styles of a plan but for those of what is divided by other means."""
    apart = Parts(whole)
    inside = [name for name in styles if name in apart]
    if inside and source == "argument":
        raise ValueError(
            f"`tensor_parallel_plan` names {inside[0]!r}, which belongs to experts that `expert_parallel_size` shares "
            "out whole: leave them out of the plan, or use `expert_parallel_size=1`."
        )
    return {name: style for name, style in styles.items() if name not in apart}


def _leave_whole_if_used_directly(module: nn.Module, blueprint: Blueprint) -> None:
    """Remove layers whose weights are used without calling them from a Hugging Face plan; refuse any other plan."""
    exposed = used_directly(module, blueprint.trace)
    for name, style in list(blueprint.styles.items()):
        if not (style.is_column or style.is_row or style in (Style.EMBEDDING_ROWWISE, Style.HEADS)):
            continue
        if holds(module, name, exposed):
            if blueprint.source != "hugging face":
                raise ValueError(
                    f"{name!r} cannot be {style.value!r}: a parameter of it is used by code that does not call this "
                    "layer and would see one rank's part of it. Call the layer, or leave it out of the plan."
                )
            del blueprint.styles[name]
            blueprint.heads.discard(name)


def _apply_rules(module: nn.Module, blueprint: Blueprint, parts: int, apart: Parts) -> None:
    """Choose styles and regions by rule, for a module without any plan."""
    trace = blueprint.trace
    if trace is None and apart:
        return
    if trace is None:
        raise ValueError(
            f"No tensor-parallel plan: {type(module).__name__} has none of its own and holds no drop-in layers, and "
            f"the rules that read its execution saw nothing to split ({blueprint.untraced}). Give the "
            "LightningModule a `forward` that `training_step` calls, and set `example_input_array` on it (or pass "
            "`example=` to `parallelize`), or pass `tensor_parallel_plan={pattern: style}`."
        )
    for name, call in trace.calls.items():
        if is_attention(call.module) and name not in apart:
            check_divisible(call.module.num_heads, parts, f"`num_heads` of {name!r}")
            blueprint.styles[name] = Style.HEADS
    exposed = used_directly(module, trace)
    for region in regions_from_trace(module, trace, blueprint.heads):
        if any(name in apart for name in region.members):
            continue
        if region.sizes is None and sizes_of(module.get_submodule(region.row))[0] % parts and not _repeated(region):
            continue
        if all(_can_be_split(module, name, exposed) for name in region.members):
            blueprint.regions.append(region)
            blueprint.styles |= dict.fromkeys(region.columns, Style.COLWISE) | {region.row: Style.ROWWISE}
    if not blueprint.regions and not blueprint.styles and not apart:
        direct = [name for name in trace.sources if holds(module, name, exposed)]
        why = f" (weights of {', '.join(map(repr, direct[:3]))} are used without calling the layers)" if direct else ""
        raise ValueError(
            f"No tensor-parallel plan: the rules found no column/row pair of linear layers in {type(module).__name__}"
            f"{why}; pass `tensor_parallel_plan={{pattern: style}}` or use the layers of `lightning_megatron.layers`."
        )


def _can_be_split(module: nn.Module, name: str, exposed: set[int]) -> bool:
    return splits_like_linear(module.get_submodule(name)) and not holds(module, name, exposed)


def _without_forks(blueprint: Blueprint, regions: list[Region]) -> list[Region]:
    """The regions whose columns are read by one row-parallel layer only.

    Layers of the other regions are split separately, with gathered outputs; an explicit plan is refused instead.
    """
    rows: dict[str, list[str]] = {}
    for region in regions:
        for name in region.columns:
            rows.setdefault(name, []).append(region.row)
    forks = {name: found for name, found in rows.items() if len(found) > 1}
    if forks and blueprint.source == "argument":
        name, found = next(iter(forks.items()))
        raise ValueError(
            f"The plan is wrong for {name!r}: its output is read by {' and '.join(map(repr, found))}, and can be split "
            "for one row-parallel layer only; use 'colwise_gather_output' for it and 'rowwise_split_input' for them."
        )
    dissolved = [region for region in regions if forks.keys() & region.columns]
    for region in dissolved:
        blueprint.styles |= dict.fromkeys(region.columns, Style.COLWISE_GATHER_OUTPUT)
        blueprint.styles[region.row] = Style.ROWWISE_SPLIT_INPUT
    return [region for region in regions if region not in dissolved]


def _repeated(region: Region) -> bool:
    """Whether the region belongs to a numbered layer; leaving those whole would save no memory."""
    return generalize(region.row) != region.row


def _settle_regions(module: nn.Module, blueprint: Blueprint, parts: int) -> None:
    """Choose cuts for every region; regions of the same shape share one decision."""
    decided: dict[Any, Region] = {}
    settled = []
    order = {name: index for index, (name, _) in enumerate(module.named_modules())}
    seen = seen_outside(blueprint.regions, blueprint.trace)
    for region in sorted(blueprint.regions, key=lambda region: order[region.row]):
        _check_sizes(module, region, parts)
        apart = _why_apart(module, region)
        key = (_shape_key(module, region), bool(seen.intersection(region.columns)), apart)
        if key in decided:
            settled.append(_like(decided[key], region))
        else:
            decided[key] = _settle_one(module, blueprint, region, parts, seen, apart)
            settled.append(decided[key])
    settled = [region for region in settled if _can_be_gathered(module, blueprint, region, parts)]
    settled = regather_shared(settled, blueprint.trace, functools.partial(_gathered_or_refused, module, blueprint))
    blueprint.regions = settled
    for region in settled:
        for name in region.columns:
            packed = len(region.cuts[name].segments) > 1
            style = Style.PACKED_COLWISE if packed else Style.COLWISE
            blueprint.styles[name] = Style.COLWISE_GATHER_OUTPUT if region.gathered else style
        if blueprint.styles.get(region.row) is not Style.PACKED_ROWWISE:
            blueprint.styles[region.row] = Style.ROWWISE_SPLIT_INPUT if region.gathered else Style.ROWWISE


def _why_apart(module: nn.Module, region: Region) -> str:
    """Why the layers of a region take and give whole tensors, whatever a trial would show; or ""."""
    if name := hooked_inside(module, region.members, region.scope):
        return f"a hook on {name!r} needs what is whole"
    place = leaves_entries_out(module, common_parent(region.members))
    return f"code may call one of them without the other ({place})" if place else ""


def _settle_one(
    module: nn.Module, blueprint: Blueprint, region: Region, parts: int, seen: set[str], apart: str
) -> Region:
    if region.gathered:
        return region
    others = [name for name in region.others if blueprint.styles.get(name) is not Style.MLA_KV_A_PROJ]
    if others:
        reason = f"it also reads {', '.join(others)}, which the plan does not split"
        return _gathered_or_refused(module, blueprint, region, reason)
    if left := [name for name in region.columns if name in seen]:
        reason = f"the module computes something else from the output of {', '.join(map(repr, left))}"
        return _gathered_or_refused(module, blueprint, region, reason)
    if apart:
        return _gathered_or_refused(module, blueprint, region, apart)
    packed: bool | None = None
    if blueprint.source == "argument":
        packed = any(blueprint.styles[name] is Style.PACKED_COLWISE for name in region.columns)
    if blueprint.trace is None or any(p.is_meta for p in module.get_submodule(region.row).parameters()):
        return replace(region, cuts=next(proposals(module, region, parts, packed)), note="not tried: no example input")
    found, reason = _settle(module, region, blueprint, parts, packed)
    if found is not None:
        return found
    other = None if packed is None else _settle(module, region, blueprint, parts, not packed)[0]
    return _gathered_or_refused(module, blueprint, region, reason, other)


def _settle(
    module: nn.Module, region: Region, blueprint: Blueprint, parts: int, packed: bool | None
) -> tuple[Region | None, str]:
    """Choose cuts, attributes and arguments with which the terms of the ranks add up to the whole output.

    Args:
        module: the traced module.
        region: columns and row, without chosen cuts.
        blueprint: the plan so far, with a trace.
        parts: size of the tensor group.
        packed: whether columns hold packed parts; None to try both.

    Returns:
        The region with the first cut that passes the trial, or None and the reason why the closest proposal failed.
    """
    trace = blueprint.trace
    if trace is None or region.scope not in trace.calls or region.row not in trace.calls:
        return None, "it did not run on the tiny input"
    if replaced := [name for name in trace.replaced if lies_in(name, region.scope)]:
        return None, f"the model replaces {min(replaced)!r} as it runs"
    try:
        bench = Bench(region, trace)
    except Exception as error:  # the user's code may take another path when it runs again
        return None, f"its code cannot be run again ({type(error).__name__}: {error})".splitlines()[0]
    reason, closest = "no way to cut it divides evenly", ""
    for cuts in proposals(module, region, parts, packed):
        for candidate in candidates(module, region, cuts, parts, trace):
            objection = bench.objection(candidate, parts)
            if not objection:
                methods = {(owner, method) for owner, names in bench.methods.items() for method in names}
                return replace(candidate, methods=methods, tried=tensor_arguments(*bench.arguments)), ""
            closest = objection if objection.startswith("in training") else closest
            reason = closest or objection
    cut = (replace(region, cuts=cuts) for cuts in proposals(module, region, parts, packed))
    return bench.by_views(cut, parts) if blueprint.by_views else None, reason


def _gathered_or_refused(
    module: nn.Module, blueprint: Blueprint, region: Region, reason: str, other: Region | None = None
) -> Region:
    """The region with gathered outputs, which is always correct; an explicit plan is refused instead.

    Args:
        module: the traced module.
        blueprint: the plan so far.
        region: what cannot be cut.
        reason: why.
        other: the region as it could be cut, with the other style of columns that the user might have meant.
    """
    if blueprint.source == "argument":
        first = region.columns[0]
        style = Style.PACKED_COLWISE if other is not None and len(other.cuts[first].segments) > 1 else Style.COLWISE
        advice = (
            f"use {style.value!r} for {first!r}"
            if other is not None
            else "use 'colwise_gather_output' and 'rowwise_split_input' (the code between reads whole sizes)"
        )
        raise ValueError(
            f"The plan is wrong for {', '.join(map(repr, region.columns))} -> {region.row!r}: {reason}; {advice}."
        )
    gathered = {n: ColumnCut.blocks(sizes_of(module.get_submodule(n))[1]) for n in region.columns}
    return region.gather(gathered, f"gathered: {reason}")


def _can_be_gathered(module: nn.Module, blueprint: Blueprint, region: Region, parts: int) -> bool:
    """Whether outputs that are to be gathered are divisible; if not, the layers of the region stay whole."""
    fits = all(sizes_of(module.get_submodule(name))[1] % parts == 0 for name in region.columns)
    if fits or not region.note.startswith("gathered"):
        return True
    for name in region.members:
        blueprint.styles.pop(name, None)
    return False


def _check_sizes(module: nn.Module, region: Region, parts: int) -> None:
    if region.sizes is not None and not region.gathered:
        check_divisible(region.sizes.heads, parts, f"the number of attention heads of {region.scope!r}")
    check_divisible(sizes_of(module.get_submodule(region.row))[0], parts, f"`in_features` of {region.row!r}")


def _shape_key(module: nn.Module, region: Region) -> Any:
    shapes = tuple(sizes_of(module.get_submodule(name)) for name in region.members)
    names = tuple(generalize(name) for name in region.members)
    updates = tuple(structure_of(module.get_submodule(name)) for name in region.members)
    return (
        names,
        shapes,
        updates,
        region.sizes,
        len(region.tables),
        region.gathered,
        type(module.get_submodule(region.scope)),
    )


def _like(decided: Region, region: Region) -> Region:
    """Apply the decision for one region to another of the same shape."""
    columns = dict(zip(decided.columns, region.columns, strict=True))
    owners = {parent(a): parent(b) for a, b in columns.items()}
    return replace(
        region,
        gathered=decided.gathered,
        cuts={columns[name]: cut for name, cut in decided.cuts.items()},
        attributes={(owners[name], attribute): value for (name, attribute), value in decided.attributes.items()},
        methods={(owners[name], method) for name, method in decided.methods},
        arguments=decided.arguments,
        narrowed=None if decided.narrowed is None else (owners[decided.narrowed[0]], decided.narrowed[1]),
        views=decided.views,
        tried=decided.tried,
        note=decided.note,
    )


def carried_over(blueprint: Blueprint, study: Study, module: nn.Module) -> Blueprint:
    """Translate decisions made for a stand-in to the user's ``module``."""
    if study.module is module:
        return blueprint
    order = {name: index for index, (name, _) in enumerate(module.named_modules())}
    regions = [_renamed(region, rename) for region in blueprint.regions for rename in study.renames(region.row)]
    return replace(
        blueprint,
        styles={original: style for name, style in blueprint.styles.items() for original in study.originals(name)},
        regions=sorted(regions, key=lambda region: order[region.row]),
        heads={original for name in blueprint.heads for original in study.originals(name)},
        products={original: cut for name, cut in blueprint.products.items() for original in study.originals(name)},
    )


def _renamed(region: Region, rename: Rename) -> Region:
    return replace(
        region,
        columns=[rename(name) for name in region.columns],
        row=rename(region.row),
        scope=rename(region.scope),
        tables=[rename(name) for name in region.tables],
        inner=[rename(name) for name in region.inner],
        others=[rename(name) for name in region.others],
        cuts={rename(name): cut for name, cut in region.cuts.items()},
        narrowed=None if region.narrowed is None else (rename(region.narrowed[0]), region.narrowed[1]),
        attributes={(rename(name), key): value for (name, key), value in region.attributes.items()},
        methods={(rename(name), method) for name, method in region.methods},
    )
