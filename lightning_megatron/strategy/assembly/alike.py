"""Making ranks start alike: weights built on the meta device, replicas, tied copies, and random streams."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_megatron.checkpoints.loading.as_built import hidden_like
from lightning_megatron.data_parallel.batch_norm import sync_batch_norms
from lightning_megatron.layers.table import ParameterSharding
from lightning_megatron.mesh.draws.random_streams import collect_rng_state, mix, restore_rng_state, state_digest
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import raw_broadcast
from lightning_megatron.mesh.messages.flat_broadcast import broadcast_tensors
from lightning_megatron.mesh.parts.boxes import ShardSpec
from lightning_megatron.mesh.parts.names import leaf_of, outwards, unit_of
from lightning_megatron.parallelize.reading.kinds import as_written
from lightning_megatron.strategy.assembly.later_units import LaterUnits, UnitMember


def agree_on_random_state(mesh: ParallelMesh, device: torch.device) -> None:
    """Give all ranks of a replica the random state of the rank that computes the loss; with a seed, all replicas too.

    Without it they could shuffle and draw differently, and so load different batches. The seed is not set again, as
    Lightning's distributed strategies do: shuffling goes on from where one process would go on.
    """
    if "PL_GLOBAL_SEED" in os.environ and mesh.layout.world_size > 1:
        _copy_random_state(0, None, device)
        return
    if mesh.layout.pipeline > 1:
        _copy_random_state(mesh.loss_rank, mesh.group("pipeline_parallel"), device)
    if mesh.layout.context > 1:
        group = mesh.group("context_parallel")
        _copy_random_state(dist.get_global_rank(group, 0), group, device)
    if mesh.layout.tensor > 1:
        group = mesh.group("tensor_parallel")
        _copy_random_state(dist.get_global_rank(group, 0), group, device)


def _copy_random_state(source: int, group: Any, device: torch.device) -> None:
    restore_rng_state(objects.broadcast(collect_rng_state(device), source, group), device)


def agree_on_base_seed(device: torch.device) -> int:
    """One seed for the whole world, taken from the random state of global rank 0, which is not advanced."""
    seed = torch.tensor([state_digest()], dtype=torch.int64, device=device)
    if dist.is_initialized():
        raw_broadcast(seed, 0, None)
    return int(seed.item())


def agree_on_weights(
    module: nn.Module, mesh: ParallelMesh, shared: Mapping[str, Any], alike: Collection[str] = ()
) -> None:
    """Make replicas equal, and copies of one parameter on several stages.

    Args:
        module: this rank's part of the module.
        mesh: the grid.
        shared: parameter name -> group of all ranks that hold it, for parameters on several stages and of experts;
            ``None`` where it is this one alone.
        alike: names of tensors that all ranks will make, or read, by themselves.
    """
    parameters = dict(module.named_parameters())
    if mesh.layout.data > 1:
        own = [p for name, p in parameters.items() if name not in shared and name not in alike]
        source = mesh.layout.rank(tensor=mesh.coordinates.tensor, pipeline=mesh.stage)
        buffers = [buffer for name, buffer in module.named_buffers() if name not in alike]
        broadcast_tensors([*own, *buffers], source, mesh.group("data_parallel"))
    by_group: dict[int, tuple[Any, list[Tensor]]] = {}
    for name, group in shared.items():
        if group is not None and name not in alike:
            by_group.setdefault(id(group), (group, []))[1].append(parameters[name])
    for group, tensors in by_group.values():
        broadcast_tensors(tensors, min(dist.get_process_group_ranks(group)), group)


def materialize(
    module: nn.Module,
    device: torch.device,
    base_seed: int,
    table: Mapping[str, ParameterSharding],
    settle: Callable[[Iterable[str]], None] | None = None,
    hidden: Collection[str] = (),
) -> LaterUnits | None:
    """Allocate and initialise what was built on the meta device; what is already real stays.

    Each submodule is initialised by the code it brings (``_init_weights`` of an ancestor, ``reset_parameters`` or
    ``_reset_parameters``), from a stream seeded by its name. So weights depend on the seed alone, not on which rank
    holds them.

    A parent comes after its children, as in torch's and Hugging Face's constructors, and may change what they drew
    (GPT-2's scaled output projections). A parameter that is split over tensor-parallel ranks is initialised whole, one
    layer at a time, and then cut, so its logical values do not depend on the split either.

    Args:
        module: this rank's part of the module.
        device: where to allocate.
        base_seed: equal on all ranks.
        table: how each parameter is split over tensor-parallel ranks.
        settle: called with the names of submodules that were initialised together, before others get memory.
        hidden: names of parameters that give back their memory then, as their values are wanted later.

    Returns:
        The values of these; ``None`` if there are none.

    Raises:
        RuntimeError: a submodule with tensors on the meta device has no code to initialise them.
    """
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return None
    memo: dict[int, nn.Parameter] = {}
    devices = [device] if device.type == "cuda" else []
    units = _units(module)
    later = LaterUnits(units, hidden, table, device, partial(_initialize_unit, module, base_seed))
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        for members in units:
            for _, child, _ in members:
                _allocate(child, device, memo)
            whole = {name: _show_whole(name, child, device, table) for name, child, pending in members if pending}
            _initialize_unit(module, base_seed, members)
            for name, child, pending in members:
                if pending:
                    _cut(child, whole[name])
            if settle is not None:
                settle(name for name, *_ in members)
            for name, _, parameter in (each for member in members for each in member.parameters()):
                if name in later.hidden:
                    parameter.data = hidden_like(parameter, device)
    return later if later.hidden else None


def _initialize_unit(module: nn.Module, base_seed: int, members: Sequence[UnitMember]) -> None:
    for name, child, pending in members:
        torch.manual_seed(mix(base_seed, *name.encode()))
        _initialize(module, name, child, pending)


def _units(module: nn.Module) -> list[list[UnitMember]]:
    """The units of initialisation: a numbered layer with all its parts, children first, or a part outside them."""
    units: dict[str, list[UnitMember]] = {}
    for name, child in _children_first(module, "", set()):
        pending, unit = _holds_meta(child), unit_of(name)
        if pending or unit != name or leaf_of(name).isdigit():
            units.setdefault(unit, []).append(UnitMember(name, child, pending))
    return [members for members in units.values() if any(pending for *_, pending in members)]


def _children_first(module: nn.Module, name: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for key, child in module.named_children():
        yield from _children_first(child, f"{name}.{key}" if name else key, seen)
    yield name, module


def _show_whole(
    name: str, module: nn.Module, device: torch.device, table: Mapping[str, ParameterSharding]
) -> dict[str, tuple[nn.Parameter, ShardSpec]]:
    """Put whole parameters in the place of split ones; returns the split ones."""
    split = {}
    for leaf, parameter in module._parameters.items():
        entry = table.get(f"{name}.{leaf}" if name else leaf)
        if parameter is not None and entry is not None and not entry.replicated:
            split[leaf] = (parameter, entry.spec)
            empty = torch.empty(entry.spec.global_shape, dtype=parameter.dtype, device=device)
            module._parameters[leaf] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return split


def _cut(module: nn.Module, split: Mapping[str, tuple[nn.Parameter, ShardSpec]]) -> None:
    for leaf, (parameter, spec) in split.items():
        whole = module._parameters[leaf]
        assert whole is not None
        parameter.copy_(spec.slice_full(whole.detach()))
        module._parameters[leaf] = parameter


def _holds_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


def _allocate(module: nn.Module, device: torch.device, memo: dict[int, nn.Parameter]) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            if id(parameter) not in memo:
                empty = torch.empty_like(parameter, device=device)
                memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = memo[id(parameter)]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)


def _initialize(root: nn.Module, name: str, module: nn.Module, pending: bool) -> None:
    """Run the code that the module, as its author wrote it, brings to initialise itself, and that of those above."""
    inherited = _initializer_above(root, name)
    with as_written(module):
        own = next((m for m in ("reset_parameters", "_reset_parameters") if callable(getattr(module, m, None))), None)
        if own is not None and pending:
            getattr(module, own)()
        if inherited is not None:
            inherited(module)
    if pending and own is None and inherited is None:
        raise RuntimeError(
            f"`{name}` ({type(module).__name__}) was built on the meta device but cannot initialise itself; give it a "
            "`reset_parameters()` method, or one of its parents an `_init_weights(module)`."
        )


def _initializer_above(root: nn.Module, name: str) -> Any:
    """``_init_weights`` of the nearest module above ``name`` that has one."""
    for above in list(outwards(name))[1:]:
        initializer = getattr(root.get_submodule(above), "_init_weights", None)
        if callable(initializer) and _takes_one_argument(initializer):
            return initializer
    return None


def _takes_one_argument(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    return True


def synchronize(module: nn.Module, mesh: ParallelMesh, *, wanted: bool) -> None:
    """Let batch norms take their statistics over the replicas of this stage, or alone, as in an earlier run."""
    several = wanted and mesh.layout.data > 1
    left = sync_batch_norms(module, mesh.group("data_parallel") if several else None)
    if left:
        rank_zero_warn(
            f"`Trainer(sync_batchnorm=True)` leaves {', '.join(f'`{name}`' for name in left)} as they are: these batch "
            "norms compute by a forward of their own."
        )
