"""Requirements of an optimizer in host memory on the run, the optimizers and the hosts, checked before training."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.data_parallel.buckets.bucket import NARROW
from lightning_megatron.data_parallel.buckets.host_memory import GIB, HostMemory, check_folder, free_bytes
from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.data_parallel.offload_request import Offload
from lightning_megatron.data_parallel.update.host_plan import HostPlan, measure
from lightning_megatron.data_parallel.update.trial import Independence, state_bytes, steps_in_parts
from lightning_megatron.mesh.messages import host_link, objects
from lightning_megatron.planner.cost.host_update import best_stride
from lightning_megatron.strategy.processes import Processes


def refuse_own_split(gradients: ModelGradients) -> None:
    """Refuse a module that has split itself, whose gradients torch sums.

    Raises:
        MisconfigurationException: it has.
    """
    if gradients.options.offload is not None:
        raise MisconfigurationException(
            "`optimizer_offload` cannot be combined with a module whose own `configure_model` has split it; leave "
            "that to the strategy, or `optimizer_offload` out."
        )


def host_plan(
    gradients: ModelGradients, module: nn.Module, optimizers: Sequence[Optimizer], processes: Processes,
    least: Independence, *, assembles: bool,
) -> HostPlan | None:  # fmt: skip
    """The part of the optimizers that is kept in host memory; ``None`` if not asked for. Collective over the world.

    Args:
        gradients: of the module.
        module: on this rank.
        optimizers: with this rank's parameters.
        processes: of the strategy.
        least: what the optimizers update by itself.
        assembles: whether matrices are put together from several ranks for them.

    Raises:
        MisconfigurationException: they cannot step there, or a host has too little room.
    """
    asked = gradients.options.offload
    if asked is None:
        return None
    names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    apart = _on_all([bool(steps_in_parts(optimizer)) for optimizer in optimizers])
    _check_optimizers(asked, names, optimizers, least, assembles, apart)
    held = _elements(gradients, module)
    if asked.folder is not None:
        _raise_first(check_folder(asked.folder), asked)
    memory, path = HostMemory(asked.folder, processes.device), host_link.link_for(processes.device)
    copies = type(path) is not host_link.HostLink  # gradients leave during the backward
    need = sum(_bytes(count, dtype, optimizers, copies) for dtype, count in held.items()) * (1 - asked.keep)
    _raise_first(_too_little(asked, need), asked)
    stride, told = _stride(asked, optimizers, memory, path, processes.device, apart)
    place = asked.folder or "host memory"
    rank_zero_info(f"{names}: {need / GIB:.3g} GiB of this rank's weights and state lie in {place}; {told}.")
    return HostPlan(memory, path, asked.keep * sum(held.values()), apart, stride)


def _check_optimizers(
    asked: Offload, names: str, optimizers: Sequence[Optimizer], least: Independence, assembles: bool, apart: bool
) -> None:
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    wrong = None
    if least is Independence.NONE:
        wrong = f"{names}, which needs {least.value}"
    elif assembles:
        wrong = f"{names} and `tensor_parallel_size`: its matrices are put together on the device"
    elif asked.folder is not None and least is not Independence.ELEMENT:
        wrong = f"{names} in files: it needs whole matrices; use `optimizer_offload=True`"
    elif asked.folder is not None and not apart:
        wrong = f"{names} in files: it does not step on some of its parameters at a time; use `optimizer_offload=True`"
    elif isinstance(asked.interleave, int) and not apart:
        wrong = f"`interleave` and {names}: it does not step on some of its parameters at a time; use `False`"
    elif any(isinstance(rate, Tensor) and rate.device.type != "cpu" for rate in rates):
        wrong = f"{names} with a learning rate that is a tensor on the device; give a number"
    if wrong is not None:
        raise MisconfigurationException(
            f"`optimizer_offload` cannot be combined with {wrong}; or leave `optimizer_offload` out."
        )


def _elements(gradients: ModelGradients, module: nn.Module) -> dict[torch.dtype, int]:
    """How many numbers of each dtype this rank's optimizers update."""
    found: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.requires_grad and not parameter.is_meta and parameter.stride() != (0,) * parameter.dim():
            found[parameter.dtype] = found.get(parameter.dtype, 0) + parameter.numel()
    return {dtype: -(-count // gradients.replicas.shards) for dtype, count in found.items()}


def _bytes(count: int, dtype: torch.dtype, optimizers: Sequence[Optimizer], copies: bool) -> float:
    size = 4 if dtype in NARROW else dtype.itemsize
    state = size / 4 * max((state_bytes(optimizer) for optimizer in optimizers), default=0.0)
    return count * (size * (1 + copies) + state)


def _too_little(asked: Offload, need: float) -> str | None:
    """Reports too little room on this host for all of its ranks; collective over the world."""
    here = (socket.gethostname(), str(asked.folder or ""))
    rooms = objects.gather((here, need))
    together, ranks = sum(n for place, n in rooms if place == here), sum(place == here for place, _ in rooms)
    free = free_bytes(asked.folder)
    if together <= free:
        return None
    where = f"{asked.folder} has" if asked.folder is not None else "has"
    return (
        f"its {ranks} ranks need {together / GIB:.3g} GiB for weights and state, and {where} {free / GIB:.3g} GiB free"
    )


def _raise_first(wrong: str | None, asked: Offload) -> None:
    """Raise what is wrong on the first host where something is, on every rank; collective over the world."""
    told = objects.gather(None if wrong is None else f"{socket.gethostname()}: {wrong}")
    first = next((each for each in told if each is not None), None)
    if first is not None:
        other = "another folder" if asked.folder is not None else "`{'to': FOLDER}`, `{'keep': FRACTION}`"
        raise MisconfigurationException(
            f"`optimizer_offload` cannot work on {first}. Use {other}, more replicas, which share the state, or leave "
            "it out."
        )


def _stride(
    asked: Offload, optimizers: Sequence[Optimizer], memory: HostMemory, path: host_link.HostLink, device: torch.device,
    apart: bool,
) -> tuple[int | None, str]:  # fmt: skip
    """Every how manieth bucket steps on the device, the same on all ranks; and why, in words."""
    if asked.interleave != "auto":
        return asked.interleave, "all step there" if asked.interleave is None else f"1 in {asked.interleave} steps here"
    if not apart or type(path) is host_link.HostLink:  # the device is the processor
        return None, "all step there"
    speeds = measure(optimizers[0], memory, path, device) if optimizers else None
    slowest = [found for found in objects.gather(speeds) if found is not None]
    if not slowest:
        return None, "all step there"
    steps, rate = min(found.steps for found in slowest), min(found.bytes_per_s for found in slowest)
    stride = best_stride(steps, rate, 4 + state_bytes(optimizers[0]) if optimizers else 12, 2)
    strides = [found for found in objects.gather(stride) if found is not None]
    stride = max(strides, default=None)
    where = "all step there" if stride is None else f"every {stride}th bucket steps on the device"
    return stride, f"{where} ({steps / 1e9:.3g}e9 steps/s on the processor, {rate / 1e9:.3g} GB/s to the device)"


def _on_all(found: Sequence[bool]) -> bool:
    """Whether everything is true on every rank; collective over the world."""
    return all(each for ranks in objects.gather(list(found)) for each in ranks or ())
