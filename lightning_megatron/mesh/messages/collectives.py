"""Collectives as forward/backward pairs, so that autograd differentiates a split layer like any other code.

A tensor is *replicated* if every rank of the group holds all of it, *split* if every rank holds its block along
``dim``, and *partial* if its value is the sum over the ranks. Each function converts one of these into another, and its
backward converts the gradient the other way:

====================  =========================  ==========================  =======================================
name                  forward                    backward                    from -> to
====================  =========================  ==========================  =======================================
copy_to_group         identity                   all-reduce                  replicated -> read by sharded weights
reduce_from_group     all-reduce                 identity                    partial -> replicated
gather_for_shards     all-gather along dim       reduce-scatter along dim    split -> read by sharded weights
scatter_partial       reduce-scatter along dim   all-gather along dim        partial -> split
gather_from_group     all-gather along dim       own block along dim         split -> replicated
split_to_group        own block along dim        all-gather along dim        replicated -> split
====================  =========================  ==========================  =======================================

The first two are Megatron's f and g (Shoeybi et al., arXiv 1909.08053); the next two replace them under sequence
parallelism (Korthikanti et al., arXiv 2205.05198). The group is always an argument. With a group of one rank each
function returns its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.mesh.messages import exchange
from lightning_megatron.mesh.messages.objects import device_of
from lightning_megatron.mesh.watch import waits

TENSOR_AXIS = "tensor_parallel"


class Started(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Wait until the result is valid and the operand may be changed."""


def resolve_group(mesh_or_group: DeviceMesh | dist.ProcessGroup, axis: str = TENSOR_AXIS) -> dist.ProcessGroup:
    """The process group of ``axis`` of a mesh, of a mesh with one dimension, or the group itself.

    Raises:
        ValueError: the mesh has several axes, none of them called ``axis``.
        TypeError: neither a mesh nor a group.
    """
    if not isinstance(mesh_or_group, DeviceMesh):
        if not hasattr(mesh_or_group, "rank"):
            raise TypeError(
                f"`mesh` must be a DeviceMesh with a {axis!r} axis or a process group, not {mesh_or_group!r}; make one "
                "with `torch.distributed.init_device_mesh`."
            )
        return mesh_or_group
    names = mesh_or_group.mesh_dim_names or ()
    if axis in names:
        return mesh_or_group.get_group() if mesh_or_group.ndim == 1 else mesh_or_group[axis].get_group()
    if mesh_or_group.ndim == 1:
        return mesh_or_group.get_group()
    raise ValueError(f"The mesh has axes {names} and none is {axis!r}; pass `mesh[name]`, a mesh of one dimension.")


def raw_all_reduce(x: Tensor, group: dist.ProcessGroup, *, keep: bool = True, maximum: bool = False) -> Tensor:
    """All-reduce ``x`` outside autograd: sum, or element-wise maximum; ``x`` stays unchanged if ``keep``."""
    total, work = start_all_reduce(x, group, keep=keep, maximum=maximum)
    wait_for(work, "all_reduce", x, group)
    return total


def extremes_over(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each element of ``x`` over the ranks, by one all-reduce, outside autograd.

    Ranks that have no value of an element give NaN; where no rank has one, the least is ∞ and the greatest -∞.
    """
    both = torch.stack([x, -x]).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    greatest, opposite = raw_all_reduce(both, group, keep=False, maximum=True).unbind()
    return -opposite, greatest


def raw_broadcast(x: Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Broadcast the contiguous ``x`` of global rank ``source`` into ``x`` of all ranks, in place, outside autograd.

    NCCL reaches no tensor of the CPU, where weights are until they have been split: those go by way of the GPU.
    """
    carried = x.detach().to(device_of(group)) if x.device.type == "cpu" else x
    with waits.on(waits.collective, "broadcast", carried, group):
        dist.broadcast(carried, source, group=group)
    if carried.device != x.device:
        x.detach().copy_(carried)


def wait_for(work: Started | None, name: str, operand: Tensor | None, group: dist.ProcessGroup | None) -> None:
    """Wait for a collective under way.

    Args:
        work: the collective; ``None`` returns at once.
        name: its name in reports of hanging ranks.
        operand: its tensor; reports give its shape and dtype.
        group: its ranks.
    """
    if work is not None:
        with waits.on(waits.collective, name, operand, group):
            work.wait()


def world_maximum(x: Tensor) -> Tensor:
    """Element-wise maximum of ``x`` over all ranks; ``x`` may be overwritten. Collective over the world.

    Without a process group it returns ``x``.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    return x if world is None else raw_all_reduce(x, world, keep=False, maximum=True)


def start_all_reduce(
    x: Tensor, group: dist.ProcessGroup, *, keep: bool = True, maximum: bool = False
) -> tuple[Tensor, Started | None]:
    """Start an all-reduce of ``x``, outside autograd.

    Args:
        x: must not change until the work has been waited for.
        group: the ranks to reduce over.
        keep: whether ``x`` stays unchanged; otherwise it may be overwritten.
        maximum: reduce by the element-wise maximum instead of the sum.

    Returns:
        The tensor that holds the result once the work has been waited for, and the work (``None`` if there is nothing
        to wait for).
    """
    if group.size() == 1:
        return x, None
    if exchange.reduces(x, group):
        direct = exchange.DirectReduction(x, group, maximum=maximum)
        return direct.result, direct
    total = x.clone(memory_format=torch.contiguous_format) if keep else x.contiguous()
    operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    return total, dist.all_reduce(total, op=operation, group=group, async_op=True)


def raw_all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather along ``dim``, outside autograd: [.., n, ..] -> [.., group * n, ..]."""
    size = group.size()
    if size == 1:
        return x
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    wait_for(start_flat_gather(out, x, group), "all_gather", x, group)
    return _moved_back(out, dim)


def start_reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> tuple[Tensor, Started | None]:
    """Start a reduce-scatter along ``dim``, outside autograd: [.., group * n, ..] -> [.., n, ..].

    Returns:
        The tensor that holds this rank's block of the sum once the work has been waited for, and the work (``None`` if
        there is nothing to wait for).

    Raises:
        ValueError: the size of ``dim`` is not a multiple of the group's size.
    """
    size = group.size()
    if size == 1:
        return x, None
    check_divisible(x.shape[dim], size, f"dim {dim} of a tensor of shape {tuple(x.shape)}")
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    work = start_flat_scatter(out, x, group)
    return (out if dim == 0 else out.movedim(0, dim)), work


def raw_reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter along ``dim``, outside autograd: [.., group * n, ..] -> [.., n, ..], contiguous.

    Raises:
        ValueError: the size of ``dim`` is not a multiple of the group's size.
    """
    out, work = start_reduce_scatter(x, dim, group)
    wait_for(work, "reduce_scatter", x, group)
    return of_its_own(out.contiguous())


def of_its_own(output: Tensor) -> Tensor:
    """``output``, detached if it is a view: into one that a custom function returns autograd lets nobody write."""
    return output.detach() if output._is_view() else output


def _moved_back(x: Tensor, dim: int) -> Tensor:
    """Move the first dim to ``dim`` and make the result contiguous, so that callers may change it in place."""
    return x if dim == 0 else of_its_own(x.movedim(0, dim).contiguous())


def own_block(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's block of ``x`` along ``dim``: [.., group * n, ..] -> [.., n, ..]; a view.

    Raises:
        ValueError: the size of ``dim`` is not a multiple of the group's size.
    """
    size = group.size()
    if size == 1:
        return x
    check_divisible(x.shape[dim], size, f"dim {dim} of a tensor of shape {tuple(x.shape)}")
    length = x.shape[dim] // size
    return x.narrow(dim, group.rank() * length, length)


def check_divisible(value: int, size: int, what: str) -> None:
    """Refuse a value that the tensor-parallel size does not divide.

    Args:
        value: for example the number of features of a dim.
        size: the tensor-parallel size.
        what: name of the value in the error.

    Raises:
        ValueError: ``value`` is not divisible; the message names sizes and values that would be.
    """
    if value % size:
        below, above = value // size * size, (value // size + 1) * size
        values = f"{below} or {above}" if below else f"{above}"
        fitting = [str(other) for other in range(1, 2 * size) if value % other == 0][-2:]
        raise ValueError(
            f"{what} is {value}, not divisible by the tensor-parallel size {size}; use "
            f"`tensor_parallel_size={' or '.join(fitting)}`, or change the {value} to {values}."
        )


def start_flat_gather(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> Started:
    """Start an all-gather of ``x`` [n] into ``out`` [group * n]; ``x`` may be this rank's block of ``out``."""
    if exchange.exchanges(x, group):
        return exchange.start_gather(out, x, group)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return cast("Started", gather(out, x, group=group, async_op=True))


def start_flat_scatter(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> Started:
    """Start a reduce-scatter of ``x`` [group * n] into ``out`` [n]; ``out`` may be this rank's block of ``x``."""
    if exchange.exchanges(x, group):
        return exchange.ScatteredSum(out, x, group)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    return cast("Started", scatter(out, x, group=group, async_op=True))


def start_broadcast(x: Tensor, source: int, group: dist.ProcessGroup, tag: int = 0) -> Started:
    """Start a broadcast of the contiguous ``x`` of the group's rank ``source`` into the ``x`` of the others, in place.

    ``x`` must not change until the returned work has been waited for. Over gloo the broadcast may be sent as messages
    (:func:`~lightning_megatron.mesh.messages.exchange.exchanges`); messages of another ``tag`` may then overtake it.
    """
    if exchange.exchanges(x, group):
        return exchange.Broadcast(x, source, group, tag)
    return cast("Started", dist.broadcast(x, group=group, group_src=source, async_op=True))


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_from_group(grad, ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return raw_all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (copy_to_group(grad, ctx.group) if torch.is_grad_enabled() else grad), None


class _GatherForShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return raw_all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scatter_partial(grad, ctx.dim, ctx.group), None, None


class _ScatterPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return raw_reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_for_shards(grad, ctx.dim, ctx.group), None, None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return raw_all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return split_to_group(grad, ctx.dim, ctx.group), None, None


class _SplitToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return own_block(x, dim, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_from_group(grad, ctx.dim, ctx.group), None, None


def _apply(function: Any, *args: Any) -> Tensor:
    """Run an autograd function, outside the graph of a compiled layer; typed, which torch's ``apply`` is not."""
    return cast(Tensor, _run_eagerly(function, *args) if torch.compiler.is_compiling() else function.apply(*args))


def _run(function: Any, *args: Any) -> Any:
    return function.apply(*args)


_run_eagerly: Callable[..., Any] = torch.compiler.disable(_run)


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """f: return ``x``; the backward all-reduces the partial gradient. Any shape -> same shape."""
    return x if group.size() == 1 else _apply(_CopyToGroup, x, group)


def reduce_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """g: all-reduce the partial ``x``; the backward returns the gradient unchanged. Any shape -> same shape."""
    return x if group.size() == 1 else _apply(_ReduceFromGroup, x, group)


def gather_for_shards(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather along ``dim`` as input of split weights: [.., n, ..] -> [.., group * n, ..].

    The backward reduce-scatters the partial gradient.
    """
    return x if group.size() == 1 else _apply(_GatherForShards, x, dim, group)


def scatter_partial(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter the partial ``x`` along ``dim``: [.., group * n, ..] -> [.., n, ..].

    The backward all-gathers the gradient.
    """
    return x if group.size() == 1 else _apply(_ScatterPartial, x, dim, group)


def gather_from_group(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather along ``dim`` as input of replicated code: [.., n, ..] -> [.., group * n, ..].

    The backward keeps this rank's block of the gradient, which is the same on all ranks.
    """
    return x if group.size() == 1 else _apply(_GatherFromGroup, x, dim, group)


def split_to_group(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Keep this rank's block of a replicated tensor along ``dim``: [.., group * n, ..] -> [.., n, ..].

    The backward all-gathers the gradient.
    """
    return x if group.size() == 1 else _apply(_SplitToGroup, x, dim, group)


__all__ = [
    "TENSOR_AXIS",
    "check_divisible",
    "copy_to_group",
    "gather_for_shards",
    "gather_from_group",
    "own_block",
    "raw_all_gather",
    "raw_all_reduce",
    "raw_broadcast",
    "raw_reduce_scatter",
    "reduce_from_group",
    "resolve_group",
    "scatter_partial",
    "split_to_group",
    "start_all_reduce",
    "start_reduce_scatter",
    "wait_for",
    "world_maximum",
]
