"""`parallelize` splits the layers of a module over a tensor group; `explain` reports what it would do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.layers.table import ParameterSharding
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import resolve_group
from lightning_megatron.mesh.messages.flat_broadcast import broadcast_tensors
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.parallelize.pairs.decide import carried_over, draw_up
from lightning_megatron.parallelize.plan.blueprint import Blueprint
from lightning_megatron.parallelize.reading.copy import copy_of
from lightning_megatron.parallelize.reading.study import study_of
from lightning_megatron.parallelize.report import ParallelReport, whole_table
from lightning_megatron.parallelize.swap.layers import Builder
from lightning_megatron.parallelize.swap.sequence import SequencePlan, plan_sequence


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    plan: str | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    *,
    example: Any = None,
    synchronize: bool = True,
    splits_input: bool = True,
    by_views: bool = True,
    whole: Collection[str] = (),
) -> ParallelReport:
    """Split the layers of a module over the tensor group, in place. Collective over that group.

    Args:
        module: any module that is not split yet, the same on every rank except for the values of its parameters.
        mesh: a mesh with a ``"tensor_parallel"`` axis (or of one dimension), or a process group.
        plan: ``"auto"``, or a dict of pattern -> style, both as in Hugging Face's ``base_model_tp_plan``.
        sequence_parallel: whether activations between the split regions are split along the sequence.
        example: an input for the trial runs: a tensor, a tuple of arguments or a dict of keyword arguments. Guessed by
            default.
        synchronize: whether parameters and buffers are first broadcast from tensor rank 0, so that all ranks have the
            same initial values.
        splits_input: whether the first layer splits its input along the sequence, under ``sequence_parallel``; not
            where that is split over context ranks as well.
        by_views: whether views in the code between layers may be given sizes of one rank; not where it is compiled, or
            runs on some of the tokens.
        whole: names of modules that stay whole with all that is in them, as something else divides them.

    Returns:
        The plan that was applied, with a table of all parameters.

    Raises:
        ValueError: the plan does not fit the module or the size of the group; the message says what to change.
    """
    group = resolve_group(mesh)
    size = group.size()
    if size == 1:
        return ParallelReport("none", 1, False, whole_table(module))
    if synchronize:
        broadcast_state(module, group)
    given = module, size, plan, sequence_parallel, example, whole
    blueprint, sequence = _decide(*given, splits_input=splits_input, by_views=by_views)
    _agree(blueprint, group)
    return _carry_out(module, group, blueprint, sequence)


def explain(
    module: nn.Module,
    size: int,
    plan: str | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    *,
    example: Any = None,
    whole: Collection[str] = (),
) -> ParallelReport:
    """Report what `parallelize` would do on ``size`` ranks, without processes; the module does not change.

    Args:
        module: a module that is not split yet, with real parameters or on the meta device.
        size: size of the tensor group.
        plan: as for `parallelize`.
        sequence_parallel: as for `parallelize`.
        example: as for `parallelize`.
        whole: as for `parallelize`.

    Returns:
        The report of the first rank of the group; print its ``explain()``.

    Raises:
        ValueError: as for `parallelize`.
    """
    if size < 1:
        raise ValueError(f"`size={size}` must be the number of tensor-parallel ranks, at least 1.")
    if size == 1:
        return ParallelReport("none", 1, False, whole_table(module))
    blueprint, sequence = _decide(module, size, plan, sequence_parallel, example, whole)
    weightless = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    paper = copy_of(module, weightless)
    if sequence is not None:
        sequence.module = paper
    return _carry_out(paper, cast(dist.ProcessGroup, _PaperGroup(size)), blueprint, sequence)


class _PaperGroup:
    """Stands for a tensor group without processes: it has a size and the rank 0, and cannot communicate."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def _decide(
    module: nn.Module,
    size: int,
    plan: str | Mapping[str, str],
    sequence_parallel: bool,
    example: Any,
    whole: Collection[str] = (),
    unlike: Collection[str] = (),
    *,
    splits_input: bool = True,
    by_views: bool = True,
) -> tuple[Blueprint, SequencePlan | None]:
    """All decisions about a module, which does not change. Compiled parts run uncompiled in the trials."""
    if not isinstance(plan, (str, Mapping)):
        raise ValueError(f"`plan` must be 'auto' or a dict of patterns and styles, not {plan!r}.")
    with torch.compiler.set_stance("force_eager"):
        study = study_of(module, plan, unlike)
        apart = Parts(whole)
        kept = [name for name, _ in study.module.named_modules() if study.originals(name)[0] in apart] if whole else ()
        blueprint = draw_up(study.module, size, plan, example, kept, by_views=by_views)
        across = next(filter(None, (study.list_across(region.members) for region in blueprint.regions)), None)
        if across is not None:  # layers that are split by turns
            beside = whole, (*unlike, across)
            given = module, size, plan, sequence_parallel, example, *beside
            return _decide(*given, splits_input=splits_input, by_views=by_views)
        sequence = plan_sequence(study.module, blueprint, splits_input) if sequence_parallel else None
        carried = None if sequence is None else sequence.carried_over(study, module)
        return carried_over(blueprint, study, module), carried


def _agree(blueprint: Blueprint, group: dist.ProcessGroup) -> None:
    """Check that all ranks chose the same plan; with different ones they would wait for messages that nobody sends.

    Raises:
        ValueError: they have not; the message says where they differ.
    """
    own = {name: str(style) for name, style in blueprint.styles.items()}
    own |= {region.scope: ", ".join(region.members) for region in blueprint.regions}
    first, *others = objects.gather(own, group)
    for rank, other in enumerate(others, 1):
        if other != first:
            name = next(name for name in (*first, *other) if first.get(name) != other.get(name))
            decided = [plan.get(name, "left whole") for plan in (first, other)]
            raise ValueError(
                f"tensor-parallel ranks 0 and {rank} would split the module differently: `{name}` is {decided[0]} on "
                f"one and {decided[1]} on the other. The module must be the same on every rank; look for attributes or "
                "hooks that only some ranks have, or pass the plan: `tensor_parallel_plan={...}`."
            )


def _carry_out(
    module: nn.Module, group: dist.ProcessGroup, blueprint: Blueprint, sequence: SequencePlan | None
) -> ParallelReport:
    """Apply the decisions to ``module``, in place, and report them."""
    report = ParallelReport(blueprint.source, group.size(), sequence is not None, whole_table(module))
    builder = Builder(module, group, blueprint, sequence)
    blueprint.trace = None  # frees the tensors of the trial run before memory is needed
    builder.build()
    _fill(module, report, builder, sequence)
    report.notes += _remarks(blueprint)
    if sequence is not None and sequence.gathers_each:
        why = sequence.between or "the code between them was not tried: give the module a `forward` that runs it"
        report.notes.append(f"Under sequence parallelism each layer gathers its output ({why}).")
    return report


def broadcast_state(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Broadcast parameters and buffers from the first rank of the group; meta tensors are skipped. Collective."""
    source = dist.get_global_rank(group, 0)
    tensors = {id(t): t for t in [*module.parameters(), *module.buffers()]}.values()
    with torch.no_grad():
        broadcast_tensors([tensor.data for tensor in tensors if not tensor.is_meta], source, group)


def _fill(module: nn.Module, report: ParallelReport, builder: Builder, sequence: SequencePlan | None) -> None:
    """Fill the table of all parameters: tied names share an entry; on sequence shards, gradients are partial sums."""
    names = list(module.named_parameters(remove_duplicate=False))
    by_identity: dict[int, ParameterSharding] = {}
    for name, parameter in names:  # a layer that is split under one name may lie unused under another
        if name in builder.table:
            by_identity.setdefault(id(parameter), builder.table[name])
    for name, parameter in names:
        if sequence is not None and sequence.covers(name) and report.parameters[name].replicated:
            by_identity.setdefault(id(parameter), ParameterSharding(report.parameters[name].spec, True))
    for name, parameter in names:
        report.parameters[name] = by_identity.get(id(parameter), report.parameters[name])
    report.buffers = {name: entry for name, entry in builder.table.items() if name not in report.parameters}
    report.rows += builder.rows


def _remarks(blueprint: Blueprint) -> list[str]:
    if blueprint.untraced:
        return [f"The plan was not tried on an example ({blueprint.untraced})."]
    return []
