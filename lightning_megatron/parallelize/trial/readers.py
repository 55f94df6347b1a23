"""Finds code outside a region that reads its outputs or parameters, which forbids splitting it.

Splitting a region is correct if its row-parallel sum is its only output. There are three exceptions: the module returns
or keeps the output of a column (activations for a penalty, attention weights); a parameter is used inside and outside
(its gradient would be a partial sum plus a whole one); a weight is used without calling its layer. In the first two
cases the region is gathered; in the last the layer stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.parts.names import lies_in
from lightning_megatron.parallelize.plan.blueprint import Region
from lightning_megatron.parallelize.plan.patterns import generalize
from lightning_megatron.parallelize.plan.styles import Style
from lightning_megatron.parallelize.reading.divisible import divisible, tensors_of
from lightning_megatron.parallelize.reading.kinds import is_table, looks_up_rows
from lightning_megatron.parallelize.reading.low_rank import base_of, structure_of
from lightning_megatron.parallelize.reading.trace import Trace, relative, tensors_left
from lightning_megatron.parallelize.trial.training import TOLERANCE, has_numbers


def seen_outside(regions: Iterable[Region], trace: Trace | None) -> set[str]:
    """Columns whose outputs are also read by code other than their row-parallel layer."""
    if trace is None:
        return set()
    groups: dict[Any, list[Region]] = {}
    for region in regions:
        if not region.gathered and not trace.results.intersection(region.columns):
            groups.setdefault((generalize(region.row), *map(generalize, region.columns)), []).append(region)
    return trace.results | _read_elsewhere(trace, list(groups.values()))


def used_directly(module: nn.Module, trace: Trace | None) -> set[int]:
    """Ids of the parameters that are used without calling their layer (linear, embedding, attention).

    The weight of an embedding tied to a layer with low-rank updates is included, because the two would be split in
    different ways, and that of an embedding whose class does more than to look up rows. So is what a module that is
    cut like a linear layer shares with others.
    """
    updated = {id(p) for part in module.modules() if structure_of(part) for p in base_of(part).parameters()}
    tables = [part for part in module.modules() if is_table(part)]
    tied = {id(part.weight) for part in tables} & updated
    tied |= {id(part.weight) for part in tables if not looks_up_rows(part)}
    tied |= _shared_products(module)
    met = set() if trace is None else trace.loose.union(trace.used, *trace.between.values())
    return tied | {id(module.get_parameter(name)) for name in met}


def _shared_products(module: nn.Module) -> set[int]:
    """Ids of the tensors of modules that are cut like a linear layer which lie in other modules too."""
    own = [(name, tensors_of(part)) for name, part in module.named_modules() if name and divisible(part) is not None]
    if not own:
        return set()
    held: dict[int, set[str]] = {}
    everything = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in everything:
        held.setdefault(id(tensor), set()).add(name)
    outside = [(x, name) for name, tensors in own for x in tensors.values()]
    return {id(x) for x, name in outside if not all(lies_in(holder, name) for holder in held[id(x)])}


def holds(module: nn.Module, name: str, parameters: set[int]) -> bool:
    """Whether the layer ``name`` has one of these parameters, or buffers, given by id."""
    return any(id(tensor) in parameters for tensor in tensors_of(module.get_submodule(name)).values())


def regather_shared(
    regions: list[Region], trace: Trace | None, gather: Callable[[Region, str], Region]
) -> list[Region]:
    """Gather regions that share a parameter with code outside split regions, until there are none left.

    Args:
        regions: regions with their final cuts.
        trace: the trace in which they were found.
        gather: returns the gathered form of a region, given the reason, or raises.
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
    """Parameters and per-head tables of a region that code outside split regions also reads."""
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
    """The styles without gradient sums of modules that, according to the trace, see whole heads only."""
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


def _read_elsewhere(trace: Trace, groups: Sequence[Sequence[Region]]) -> set[str]:
    """Columns of those regions whose outputs are read by code other than their row-parallel layers.

    The autograd graph does not show reads without a gradient (a share of active units that is logged, a classifier on
    detached features). So the module runs again with disturbed outputs of the columns, while the rows return their
    recorded outputs. If its results or attributes change, other code has read a column.

    Args:
        trace: the trace of the module.
        groups: groups of equal regions; the regions of a group are disturbed together.
    """
    found: set[str] = set()
    for root in trace.roots:
        inside = [
            [r for r in group if all(lies_in(n, root) and n in trace.calls for n in r.members)] for group in groups
        ]
        every = [region for group in inside for region in group]
        if not every or not (runs := _Runs(trace, root, every)).differs(every):
            continue
        for group in inside:
            if group and runs.differs(group):
                found |= {name for region in group for name in region.columns}
    return found


class _Runs:
    """Runs of a traced module in which its row-parallel layers return the outputs of the first run."""

    def __init__(self, trace: Trace, root: str, regions: Sequence[Region]) -> None:
        self._root = root
        self._replay = trace.replay(root)
        self._answers: dict[str, list[Any]] = {region.row: [] for region in regions}
        self._plain = self._results({name: _keeping(answers) for name, answers in self._answers.items()})

    def differs(self, regions: Sequence[Region]) -> bool:
        """Whether results depend on the columns of these regions; False if they also vary without a disturbance."""
        if self._changed(self._results(self._answering())):
            return False
        disturbed = {name: _disturb for region in regions for name in region.columns}
        return self._changed(self._results({**self._answering(), **disturbed}))

    def _answering(self) -> dict[str, Callable[..., Any]]:
        return {name: _giving(list(answers)) for name, answers in self._answers.items()}

    def _changed(self, results: list[Tensor] | None) -> bool:
        if results is None or self._plain is None or len(results) != len(self._plain):
            return False
        return any(_differ(a, b) for a, b in zip(results, self._plain, strict=True))

    def _results(self, hooks: Mapping[str, Callable[..., Any]]) -> list[Tensor] | None:
        def prepare(copied: nn.Module) -> None:
            for name, hook in hooks.items():
                copied.get_submodule(relative(name, self._root)).register_forward_hook(hook)

        with torch.no_grad():
            try:
                copied, output = self._replay.run(prepare)
            except Exception:  # user code may refuse disturbed values; the result is then unknown
                return None
            return [x.clone() for x in tensors_left(copied, output)]


def _keeping(answers: list[Any]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        answers.append(output.clone())

    return hook


def _giving(answers: list[Any]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return answers.pop(0).clone()

    return hook


def _disturb(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    scale = output.abs().amax().clamp_min(1e-3)
    noise = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).mul(9).sin()
    return output + scale * noise.view_as(output)


def _differ(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if not has_numbers(one) or not has_numbers(other):
        return False
    if not one.is_floating_point():
        return not torch.equal(one, other)
    tolerance = TOLERANCE.get(one.dtype, 1e-4) * 0.1
    finite = torch.isfinite(other)
    zero = torch.zeros_like(other)
    scale = torch.where(finite, other, zero).abs().amax() if other.numel() else 0.0
    return bool((torch.where(finite, one - other, zero).abs() > tolerance * scale).any())
