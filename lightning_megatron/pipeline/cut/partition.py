"""Decides which stages own each layer, part and buffer of a module.

Trunk layers go to the stage that runs them. All other parts are placed by the phase in which the module's code uses
them (``pipeline.cut.reading``): before the trunk on the first stage, after it on the last, between the layers or at an
unknown time on every stage. Small parts that are used before and after it, as learned prefixes seem to be, are on every
stage too, as layers may be given what they make. Gradients of a part on several stages are summed over them, so placing
a part on more stages than necessary costs memory but does not change results.
"""

from __future__ import annotations

import fnmatch
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_megatron.mesh.parts.names import Parts, called, lies_in, owner_and_leaf, parent
from lightning_megatron.pipeline.cut.averaged_copies import Copies, find_copies
from lightning_megatron.pipeline.cut.balance import balance, balance_unequal
from lightning_megatron.pipeline.cut.reading import Uses, When, read_uses
from lightning_megatron.pipeline.cut.trunk import Trunk, find_trunk, holders_of
from lightning_megatron.pipeline.schedules.instructions import Schedule

log = logging.getLogger(__name__)

PLACES = ("first", "last", "all")
_SMALL = 8
"""A part of at most this fraction of a layer that is used before the layers and after them is on every stage."""


@dataclass(frozen=True)
class Partition:
    """The stages that own each part of a module.

    Attributes:
        trunk: the layers that are distributed over the stages.
        bounds: per virtual stage, the half-open range of indices of its layers.
        owners: per virtual stage, the stage (rank along the pipeline) that runs it.
        units: dotted name of each part outside the trunk (a module or a direct parameter) -> stages that own it.
        before: units that run only before the layers.
        after: units that run only after the layers.
        early_buffers: buffers on every stage that are used only before the layers.
        late_buffers: the other buffers on every stage.
        copies: averaged copies of trained parts, which hooks update.
    """

    trunk: Trunk
    bounds: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    units: Mapping[str, frozenset[int]]
    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    early_buffers: tuple[str, ...] = ()
    late_buffers: tuple[str, ...] = ()
    copies: Copies = field(default_factory=Copies)


def make_partition(
    module: nn.Module,
    schedule: Schedule,
    *,
    pipeline_layers: str = "auto",
    pipeline_split: str | Sequence[int] = "auto",
    placement: Mapping[str, str] | None = None,
    stage_speeds: Sequence[float] | None = None,
    hooks_write: bool = False,
    whole_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Partition:
    """Assign the layers and parts of ``module`` to the stages of ``schedule``.

    Args:
        module: the whole module, real or on the meta device.
        schedule: any schedule of the run; only its stages, chunks and placement are used.
        pipeline_layers: dotted name of the trunk, or ``"auto"``.
        pipeline_split: layers per virtual stage, or ``"auto"`` to balance forward FLOPs.
        placement: overrides, ``{"model.final_norm": "last"}``; patterns with ``*`` allowed; values first, last, all.
        stage_speeds: relative speed of each stage's devices, if they differ; used with ``pipeline_split="auto"``.
        hooks_write: whether a hook may update copies of trained parts; every stage then keeps these copies.
        whole_shapes: shapes in one process, by name, of parameters of which this rank has a slice.

    Raises:
        ValueError: no trunk, fewer layers than stages, a split that does not add up, an override that matches nothing.
    """
    trunk = find_trunk(module, pipeline_layers)
    stages = schedule.virtual_stages
    owners = tuple(schedule.owner(stage)[0] for stage in range(stages))
    uses = read_uses(module, trunk)
    copies = find_copies(module, trunk, whole_shapes) if hooks_write else Copies()
    places = _place_units(module, trunk, uses, copies, placement or {})
    units = _stages_of_places(places, owners)
    sizes = _split(module, trunk, uses, owners, pipeline_split, stage_speeds)
    starts = [sum(sizes[:stage]) for stage in range(stages + 1)]
    bounds = tuple(itertools.pairwise(starts))
    before, after = (frozenset(unit for unit, place in places.items() if place == {end}) for end in ("first", "last"))
    early, late = _shared_buffers(module, trunk, uses, [*before, *after])
    return Partition(trunk, bounds, owners, units, before, after, early, late, copies)


def _shared_buffers(
    module: nn.Module, trunk: Trunk, uses: Uses, once: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Buffers that several stages have: those used only before the layers, and all others.

    They belong to no layer and to no unit of one place; or to several, as those of a norm that layers share.
    """
    early: list[str] = []
    late: list[str] = []
    parts = Parts((*trunk.layer_names, *once))
    names: dict[tuple[int, str], list[str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for leaf in child._buffers:
            names.setdefault((id(child), leaf), []).append(f"{path}.{leaf}" if path else leaf)
    for name, _ in module.named_buffers():
        owner, leaf = owner_and_leaf(module, name)
        owners = {parts.of(each) for each in names[id(owner), leaf]}
        if len(owners) == 1 and None not in owners:
            continue
        phases = {phase for used, when in uses.items() if _covers(name, used) for phase in when}
        (early if phases == {When.BEFORE} else late).append(name)
    return tuple(early), tuple(late)


def unit_names(module: nn.Module, trunk: Trunk) -> list[str]:
    """Dotted names of the parts outside the trunk: submodules with parameters, and direct parameters.

    Children of containers without a forward of their own (``nn.ModuleDict``, ``nn.ModuleList``) are parts by
    themselves, as they may run at different times.
    """
    names: list[str] = []
    holders = {id(holder) for holder in holders_of(module.get_submodule(trunk.name), module)}
    _collect_units(module, "", trunk, names, holders)
    first = {id(child): name for name, child in module.named_modules()}
    return [name for name in names if not _is_alias(module, name, trunk, holders, first)]


def _is_alias(module: nn.Module, name: str, trunk: Trunk, holders: set[int], first: Mapping[int, str]) -> bool:
    """Whether ``name`` is a further name of something, given by a module that lists the trunk again as well."""
    owner, leaf = owner_and_leaf(module, name)
    again = id(owner) in holders and not lies_in(trunk.name, parent(name))
    return again and leaf in owner._modules and first[id(owner._modules[leaf])] != name


def parts_outside(module: nn.Module, trunk: Trunk) -> list[nn.Module]:
    """The submodules among the parts that :func:`unit_names` names."""
    found = [called(module, name) for name in unit_names(module, trunk)]
    return [part for part in found if isinstance(part, nn.Module)]


def _collect_units(module: nn.Module, name: str, trunk: Trunk, names: list[str], holders: set[int]) -> None:
    prefix = f"{name}." if name else ""
    names.extend(f"{prefix}{parameter}" for parameter, value in module._parameters.items() if value is not None)
    if name == trunk.name:
        return
    for child_name, child in module.named_children():
        path = f"{prefix}{child_name}"
        opened = isinstance(child, (nn.ModuleDict, nn.ModuleList)) or id(child) in holders
        if path == trunk.name or opened:
            _collect_units(child, path, trunk, names, holders)
        elif any(True for _ in child.parameters()):
            names.append(path)


def _place_units(
    module: nn.Module, trunk: Trunk, uses: Uses, copies: Copies, overrides: Mapping[str, str]
) -> dict[str, frozenset[str]]:
    """Place each unit outside the trunk: name -> subset of :data:`PLACES`."""
    places: dict[str, frozenset[str]] = {}
    small = _elements(*trunk.layers(module)) // len(trunk.layer_names) // _SMALL
    for name in unit_names(module, trunk):
        phases = {phase for used, when in uses.items() if _covers(name, used) for phase in when}
        if not phases or When.DURING in phases or copies.lie_in(name):
            places[name] = frozenset({"all"})
        else:
            ends = {When.BEFORE: "first", When.AFTER: "last"}
            places[name] = frozenset(end for phase, end in ends.items() if phase in phases)
            if len(places[name]) > 1 and _elements(called(module, name)) <= small:  # several stages have it anyway
                places[name] = frozenset({"all"})  # and layers may be given what it makes
    unknown = [name for name, place in places.items() if "all" in place]
    _apply_overrides(places, overrides)
    if unknown:
        log.info(
            "kept on every pipeline stage, because they run between the layers or at a time not known: %s", unknown
        )
    return places


def _elements(*units: nn.Module | nn.Parameter) -> int:
    """Elements of the parameters of some modules, and of some parameters."""
    everything = (p for unit in units for p in ([unit] if isinstance(unit, nn.Parameter) else unit.parameters()))
    return sum(parameter.numel() for parameter in everything)


def _stages_of_places(places: Mapping[str, frozenset[str]], owners: tuple[int, ...]) -> dict[str, frozenset[int]]:
    stages = {"first": frozenset({owners[0]}), "last": frozenset({owners[-1]}), "all": frozenset(owners)}
    return {name: frozenset().union(*(stages[end] for end in place)) for name, place in places.items()}


def _covers(unit: str, used: str) -> bool:
    return bool(used) and (lies_in(used, unit) or lies_in(unit, used))


def _apply_overrides(units: dict[str, frozenset[str]], overrides: Mapping[str, str]) -> None:
    for pattern, place in overrides.items():
        matched = [name for name in units if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(
                f"`pipeline_placement` names {pattern!r}, which matches none of the parts outside the trunk: "
                f"{', '.join(units) or 'there are none'}; layers lie where `pipeline_split` puts them."
            )
        if place not in PLACES:
            raise ValueError(f"`pipeline_placement[{pattern!r}]={place!r}` must be one of {', '.join(PLACES)}.")
        for name in matched:
            units[name] = frozenset({place})


def _split(
    module: nn.Module,
    trunk: Trunk,
    uses: Uses,
    owners: Sequence[int],
    split: str | Sequence[int],
    speeds: Sequence[float] | None,
) -> list[int]:
    layers, stages = len(trunk.layer_names), len(owners)
    if layers < stages:
        raise ValueError(
            f"the trunk `{trunk.name}` has {layers} layers, fewer than the {stages} pipeline stages (times chunks); "
            f"use `pipeline_parallel_size` × chunks of at most {layers}, or add layers."
        )
    if split == "auto":
        costs, before, after = _costs(module, trunk, uses)
        if speeds is not None:
            return balance_unequal(costs, [speeds[owner] for owner in owners], before, after)
        return balance(costs, owners, before, after)
    if isinstance(split, str):
        raise ValueError(f"`pipeline_split={split!r}` must be 'auto' or a list of {stages} layer counts.")
    sizes = list(split)
    if len(sizes) != stages or sum(sizes) != layers or any(size < 1 for size in sizes):
        raise ValueError(
            f"`pipeline_split={sizes}` must be {stages} positive layer counts that add up to the {layers} layers of "
            f"`{trunk.name}`."
        )
    return sizes


def _costs(module: nn.Module, trunk: Trunk, uses: Uses) -> tuple[list[float], float, float]:
    """Forward cost per token, in matrix elements (2 FLOPs each): of each layer, of the parts before, and after."""
    costs = [float(_matrix_elements(layer)) for layer in trunk.layers(module)]
    before = after = 0.0
    for name in unit_names(module, trunk):
        phases = {phase for used, when in uses.items() if _covers(name, used) for phase in when}
        unit = called(module, name)
        if When.AFTER in phases:
            after += _matrix_elements(unit, embeddings=True)
        if phases == {When.BEFORE}:
            before += _matrix_elements(unit)
    if not any(costs):
        costs = [1.0] * len(costs)
    return costs, before, after


def _matrix_elements(unit: nn.Module | nn.Parameter, *, embeddings: bool = False) -> int:
    """Elements of the weights used in matrix products; embeddings, which only look up rows, count on request."""
    if isinstance(unit, nn.Parameter):
        return 0
    total = 0
    for child in unit.modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and not embeddings:
            continue
        total += sum(p.numel() for p in child._parameters.values() if p is not None and p.dim() >= 2)
    return total
