"""From a plan to decisions: the style of every module, and the settled regions, before anything is changed.

Sources of a plan, in order: the argument; what a Hugging Face model says about itself; drop-in layers in the
module; and rules that read a trace. Whatever the source, regions are settled by trying (see ``probe``) wherever the
module could be run on a tiny input.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lightning_megatron.layers import (
    ColumnParallelLinear,
    ParallelMultiheadAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from lightning_megatron.mesh.messages.collectives import check_divisible
from lightning_megatron.parallelize.pairs.regions import Region, regions_from_styles, regions_from_trace
from lightning_megatron.parallelize.plan.huggingface import output_embeddings, own_plan
from lightning_megatron.parallelize.plan.patterns import expand, generalize
from lightning_megatron.parallelize.plan.styles import MEANINGS, Style, is_style, parse_style
from lightning_megatron.parallelize.reading.attention import ColumnCut
from lightning_megatron.parallelize.reading.inputs import run_examples
from lightning_megatron.parallelize.reading.kinds import (
    DROP_IN,
    behaves_like_linear,
    is_attention,
    is_linear,
    linear_sizes,
)
from lightning_megatron.parallelize.reading.trace import Trace
from lightning_megatron.parallelize.trial.outside import regather_shared, seen_outside, used_directly, without_idle_sums
from lightning_megatron.parallelize.trial.replay import proposals, settle


@dataclass
class Blueprint:
    """What is to become of a module.

    Attributes:
        source: where the plan came from: ``"argument"``, ``"hugging face"``, ``"drop-in layers"`` or ``"rules"``.
        styles: style of every module that is not simply left alone, by name.
        regions: settled pairs of column- and row-parallel layers.
        heads: names of vocabulary heads.
        trace: the trace that was read, if the module could be run.
        untraced: why it could not be.
    """

    source: str
    styles: dict[str, Style]
    regions: list[Region] = field(default_factory=list)
    heads: set[str] = field(default_factory=set)
    trace: Trace | None = None
    untraced: str = ""


def draw_up(module: nn.Module, parts: int, plan: str | Mapping[str, str], example: Any = None) -> Blueprint:
    """Decide how a module is split over ``parts`` ranks; the module is left as it was.

    Args:
        module: an unsharded module, its parameters real or on the meta device.
        parts: size of the tensor group.
        plan: ``"auto"``, or pattern -> style.
        example: input for the trace; guessed by default.

    Raises:
        ValueError: the plan does not fit the module, or no plan can be made; the message says what to change.
    """
    trace, untraced = run_examples(module, example)
    source, styles = _styles(module, plan)
    blueprint = Blueprint(source, styles, trace=trace, untraced=untraced)
    blueprint.heads = _vocabulary_heads(module, styles, trace)
    if source == "rules":
        _apply_rules(module, blueprint, parts)
    else:
        _check_styles(module, styles)
        _leave_whole_if_used_directly(module, blueprint)
        inner = {n: s for n, s in styles.items() if n not in blueprint.heads}
        blueprint.regions = _without_forks(blueprint, regions_from_styles(module, inner, trace))
    _settle_regions(module, blueprint, parts)
    _split_vocabulary(module, blueprint)
    blueprint.styles = without_idle_sums(blueprint.styles, module, blueprint.regions, trace)
    return blueprint


def _leave_whole_if_used_directly(module: nn.Module, blueprint: Blueprint) -> None:
    """Take layers out of a plan whose weights are used without calling them; an explicit plan is refused."""
    exposed = used_directly(module, blueprint.trace)
    for name, style in list(blueprint.styles.items()):
        if not (style.is_column or style.is_row or style in (Style.EMBEDDING_ROWWISE, Style.HEADS)):
            continue
        if _holds(module, name, exposed):
            if blueprint.source != "hugging face":
                raise ValueError(
                    f"{name!r} cannot be {style.value!r}: a parameter of it is used by code that does not call this "
                    "layer and would see one rank's part of it. Call the layer, or leave it out of the plan."
                )
            del blueprint.styles[name]
            blueprint.heads.discard(name)


def _styles(module: nn.Module, plan: str | Mapping[str, str]) -> tuple[str, dict[str, Style]]:
    """Where the plan comes from and the style it gives to each module."""
    if not isinstance(plan, str):
        return "argument", _expanded(module, plan, strict=True)
    if plan != "auto":
        raise ValueError(f"`tensor_parallel_plan={plan!r}`: a plan is 'auto' or a dict of pattern -> style.")
    own = own_plan(module)
    if own:
        return "hugging face", _expanded(module, own, strict=False)
    dropped_in = {name: _drop_in_style(m) for name, m in module.named_modules() if isinstance(m, DROP_IN)}
    if dropped_in:
        return "drop-in layers", dropped_in
    return "rules", {}


def _expanded(module: nn.Module, plan: Mapping[str, str], strict: bool) -> dict[str, Style]:
    names = list(dict(module.named_modules()))
    if strict:
        names += list(dict(module.named_parameters()))
    else:  # styles for experts and the like: those modules stay whole, which is correct
        plan = {pattern: style for pattern, style in plan.items() if is_style(style)}
    wanted = {pattern: parse_style(style, pattern) for pattern, style in plan.items()}
    if not strict:
        wanted = {p: s for p, s in wanted.items() if s is not Style.REPLICATE}
        known = {p for p in wanted if any(expand_one(p, names))}
        wanted = {p: s for p, s in wanted.items() if p in known}
    found = expand({p: s.value for p, s in wanted.items()}, names)
    return {name: wanted[pattern] for pattern, hits in found.items() for name in hits}


def expand_one(pattern: str, names: list[str]) -> list[str]:
    """Names that a pattern matches, possibly none."""
    try:
        return expand({pattern: ""}, names)[pattern]
    except ValueError:
        return []


def _drop_in_style(module: nn.Module) -> Style:
    if isinstance(module, ColumnParallelLinear):
        return Style.COLWISE_GATHER_OUTPUT if module.gather_output else Style.COLWISE
    if isinstance(module, RowParallelLinear):
        return Style.ROWWISE if module.input_is_parallel else Style.ROWWISE_SPLIT_INPUT
    return Style.EMBEDDING_ROWWISE if isinstance(module, VocabParallelEmbedding) else Style.HEADS


def _check_styles(module: nn.Module, styles: Mapping[str, Style]) -> None:
    """Every style is on a module that can take it."""
    for name, style in styles.items():
        part = dict(module.named_modules()).get(name)
        if part is None:
            raise ValueError(f"Plan entry {name!r} ({style.value}) names a parameter; plans here split modules.")
        if style.is_column or style.is_row or style is Style.MLA_KV_A_PROJ:
            fits, wanted = is_linear(part) and behaves_like_linear(part), "a linear layer"
        elif style is Style.EMBEDDING_ROWWISE:
            fits, wanted = isinstance(part, nn.Embedding), "torch.nn.Embedding"
        else:
            fits, wanted = style is not Style.HEADS or is_attention(part), "torch.nn.MultiheadAttention"
        if not fits:
            inside = [n for n, m in part.named_modules() if n and is_linear(m)][:3]
            hint = f"; it holds {', '.join(f'{name}.{n}' for n in inside)}" if inside else ""
            raise ValueError(
                f"{name!r} is a {type(part).__name__} and cannot be {style.value!r} ({MEANINGS[style]}): that needs "
                f"{wanted}{hint}."
            )


def _vocabulary_heads(module: nn.Module, styles: Mapping[str, Style], trace: Trace | None) -> set[str]:
    """Linear layers whose output features are the vocabulary, and whose output nothing else reads."""
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    tied = {id(m.weight) for m in tables}
    split = {
        id(module.get_submodule(n).get_parameter("weight")) for n, s in styles.items() if s is Style.EMBEDDING_ROWWISE
    }
    largest = max((m.num_embeddings for m in tables), default=0)
    named = {id(m) for m in output_embeddings(module)}
    heads, exposed = set(), used_directly(module, trace)
    for name, part in module.named_modules():
        if not is_linear(part):
            continue
        follows = id(part.get_parameter("weight")) in split  # tied to an embedding that the plan splits
        if styles and not follows and not styles.get(name, Style.REPLICATE).is_column:
            continue
        if trace is not None and (name not in trace.sources or trace.readers(name)):
            continue
        if _holds(module, name, exposed):
            continue
        as_many = trace is not None and linear_sizes(part)[1] == largest
        if id(part) in named or id(part.get_parameter("weight")) in tied or as_many:
            heads.add(name)
    return heads


def _apply_rules(module: nn.Module, blueprint: Blueprint, parts: int) -> None:
    """Styles and regions by rule, for a module without a plan of any kind."""
    trace = blueprint.trace
    if trace is None:
        raise ValueError(
            f"No tensor-parallel plan: {type(module).__name__} has none of its own and holds no drop-in layers, and "
            f"the rules that read its execution saw nothing to split ({blueprint.untraced}). Set `example_input_array` "
            "on the LightningModule (or pass `example=` to `parallelize`), or `tensor_parallel_plan={pattern: style}`."
        )
    for name, call in trace.calls.items():
        if isinstance(call.module, nn.MultiheadAttention):
            check_divisible(call.module.num_heads, parts, f"`num_heads` of {name!r}")
            blueprint.styles[name] = Style.HEADS
    exposed = used_directly(module, trace)
    for region in regions_from_trace(module, trace, blueprint.heads):
        if region.sizes is None and linear_sizes(module.get_submodule(region.row))[0] % parts and not _repeated(region):
            continue
        if all(_can_be_split(module, name, exposed) for name in region.members):
            blueprint.regions.append(region)
            blueprint.styles |= dict.fromkeys(region.columns, Style.COLWISE) | {region.row: Style.ROWWISE}
    if not blueprint.regions and not blueprint.styles:
        direct = [name for name in trace.sources if _holds(module, name, exposed)]
        why = f" (weights of {', '.join(map(repr, direct[:3]))} are used without calling the layers)" if direct else ""
        raise ValueError(
            f"No tensor-parallel plan: the rules found no column/row pair of linear layers in {type(module).__name__}"
            f"{why}; pass `tensor_parallel_plan={{pattern: style}}` or use the layers of `lightning_megatron.layers`."
        )


def _can_be_split(module: nn.Module, name: str, exposed: set[int]) -> bool:
    return behaves_like_linear(module.get_submodule(name)) and not _holds(module, name, exposed)


def _holds(module: nn.Module, name: str, parameters: set[int]) -> bool:
    """Whether a layer has one of these parameters, given by identity."""
    return any(id(parameter) in parameters for parameter in module.get_submodule(name).parameters())


def _without_forks(blueprint: Blueprint, regions: list[Region]) -> list[Region]:
    """The regions whose columns are read by one row-parallel layer only.

    Layers of the others are split one by one, their outputs gathered; an explicit plan is refused instead.
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
    """Whether the region belongs to a numbered layer, so that skipping it would defeat the purpose."""
    return generalize(region.row) != region.row


def _settle_regions(module: nn.Module, blueprint: Blueprint, parts: int) -> None:
    """Choose cuts for every region; regions of the same shape share one decision."""
    decided: dict[Any, Region] = {}
    settled = []
    order = {name: index for index, (name, _) in enumerate(module.named_modules())}
    seen = seen_outside(module, blueprint.regions, blueprint.trace)
    for region in sorted(blueprint.regions, key=lambda region: order[region.row]):
        _check_sizes(module, region, parts)
        key = (_shape_key(module, region), bool(seen.intersection(region.columns)))
        if key in decided:
            settled.append(_like(decided[key], region))
        else:
            decided[key] = _settle_one(module, blueprint, region, parts, seen)
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


def _settle_one(module: nn.Module, blueprint: Blueprint, region: Region, parts: int, seen: set[str]) -> Region:
    if region.gathered:
        return region
    others = [name for name in region.others if blueprint.styles.get(name) is not Style.MLA_KV_A_PROJ]
    if others:
        reason = f"it also reads {', '.join(others)}, which the plan does not split"
        return _gathered_or_refused(module, blueprint, region, reason)
    if left := [name for name in region.columns if name in seen]:
        reason = f"the module computes something else from the output of {', '.join(map(repr, left))}"
        return _gathered_or_refused(module, blueprint, region, reason)
    packed: bool | None = None
    if blueprint.source == "argument":
        packed = any(blueprint.styles[name] is Style.PACKED_COLWISE for name in region.columns)
    if blueprint.trace is None or module.get_submodule(region.row).get_parameter("weight").is_meta:
        return replace(region, cuts=next(proposals(module, region, parts, packed)), note="not tried: no example input")
    found, reason = settle(module, region, blueprint.trace, parts, packed)
    if found is not None:
        return found
    return _gathered_or_refused(module, blueprint, region, reason)


def _gathered_or_refused(module: nn.Module, blueprint: Blueprint, region: Region, reason: str) -> Region:
    """The region with whole tensors inside, which is always correct; an explicit plan is refused instead."""
    if blueprint.source == "argument":
        raise ValueError(
            f"The plan is wrong for {', '.join(map(repr, region.columns))} -> {region.row!r}: {reason}. For fused "
            "projections use 'packed_colwise'; where the code between reads global sizes, use 'colwise_gather_output' "
            "and 'rowwise_split_input'."
        )
    gathered = {n: ColumnCut.blocks(linear_sizes(module.get_submodule(n))[1]) for n in region.columns}
    return replace(
        region, gathered=True, cuts=gathered, attributes={}, arguments={}, narrowed=None, note=f"gathered: {reason}"
    )


def _can_be_gathered(module: nn.Module, blueprint: Blueprint, region: Region, parts: int) -> bool:
    """Whether the outputs divide, where they are gathered by rule; else the region's layers are left whole."""
    fits = all(linear_sizes(module.get_submodule(name))[1] % parts == 0 for name in region.columns)
    if fits or not region.note.startswith("gathered"):
        return True
    for name in region.members:
        blueprint.styles.pop(name, None)
    return False


def _check_sizes(module: nn.Module, region: Region, parts: int) -> None:
    if region.sizes is not None and not region.gathered:
        check_divisible(region.sizes.heads, parts, f"the number of attention heads of {region.scope!r}")
    check_divisible(linear_sizes(module.get_submodule(region.row))[0], parts, f"`in_features` of {region.row!r}")


def _shape_key(module: nn.Module, region: Region) -> Any:
    shapes = tuple(linear_sizes(module.get_submodule(name)) for name in region.members)
    names = tuple(generalize(name) for name in region.members)
    return names, shapes, region.sizes, len(region.tables), region.gathered, type(module.get_submodule(region.scope))


def _like(decided: Region, region: Region) -> Region:
    """The decision taken for one layer, for another of the same shape."""
    columns = dict(zip(decided.columns, region.columns, strict=True))
    owners = {a.rpartition(".")[0]: b.rpartition(".")[0] for a, b in columns.items()}
    return replace(
        region,
        gathered=decided.gathered,
        cuts={columns[name]: cut for name, cut in decided.cuts.items()},
        attributes={(owners[name], attribute): value for (name, attribute), value in decided.attributes.items()},
        arguments=decided.arguments,
        narrowed=None if decided.narrowed is None else (owners[decided.narrowed[0]], decided.narrowed[1]),
        tried=decided.tried,
        note=decided.note,
    )


def _split_vocabulary(module: nn.Module, blueprint: Blueprint) -> None:
    """Heads keep their logits split, and embeddings tied to them are split as well.

    Without a plan that says otherwise, so is an embedding of the same vocabulary that is not tied.
    """
    weights = {id(module.get_submodule(name).get_parameter("weight")) for name in blueprint.heads}
    sizes = {linear_sizes(module.get_submodule(name))[1] for name in blueprint.heads}
    exposed = used_directly(module, blueprint.trace)
    if blueprint.source in ("argument", "drop-in layers"):
        sizes = set()
    for name in blueprint.heads:
        blueprint.styles[name] = Style.COLWISE_GATHER_OUTPUT
    for name, part in module.named_modules():
        if not isinstance(part, nn.Embedding) or part.sparse or part.max_norm is not None:
            continue
        if id(part.weight) in exposed:
            continue
        tied = id(part.weight) in weights
        read = blueprint.trace is None or name in blueprint.trace.calls
        if tied or (read and part.num_embeddings in sizes and _first_of_size(module, part)):
            blueprint.styles[name] = Style.EMBEDDING_ROWWISE


def _first_of_size(module: nn.Module, part: nn.Embedding) -> bool:
    same = [m for m in module.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == part.num_embeddings]
    return same[0] is part


__all__ = ["Blueprint", "ParallelMultiheadAttention", "draw_up"]
