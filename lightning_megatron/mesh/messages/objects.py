"""Python values sent between ranks: the one place that knows how a value becomes bytes and how its length is told.

A value is pickled, its length goes first, and the bytes follow; ``None`` has no bytes, so a round in which nobody has
anything to say costs one small collective. Ranks 0 to 3 of a group, of which only rank 2 has something::

    lengths   [0, 0, 17, 0]                          gather(value)        -> [None, None, "out of memory", None], on all
    bytes     rank 2's 17, the others padded         gather_to(value, 0)  -> the same list on rank 0, None elsewhere
                                                     broadcast(value, 2)  -> "out of memory", on all

Values come back as copies, in the order of ranks in the group. Tensors inside of them are pickled with their device;
move them to the CPU first. The bytes travel on a device that the group's backend can reach, which is the current GPU
for a group over NCCL alone. Only unpickles what ranks of this run have sent.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.watch import waits

_NOT_SENT = -1


def encode(value: Any) -> Tensor:
    """The bytes of ``value`` on the CPU, uint8 [length]; of length 0 for ``None``."""
    if value is None:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def decode(data: Tensor) -> Any:
    """The value whose bytes are ``data`` [length], on any device."""
    return pickle.loads(data.cpu().numpy().data) if data.numel() else None


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, on every rank of the group (of the world for ``None``), in order of rank; collective."""
    if _alone(group):
        return [value]
    data, lengths = _announce(value, group)
    longest = max(lengths)
    if longest == 0:
        return [None] * len(lengths)
    everyone = data.new_empty(len(lengths), longest)
    with waits.on(waits.collective, "all_gather", data, group):
        dist.all_gather(list(everyone.unbind()), _padded(data, longest), group=group)
    return _decoded(everyone, lengths)


def gather_to(value: Any, destination: int, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Every rank's value, on global rank ``destination`` in order of rank, and ``None`` elsewhere; collective."""
    if _alone(group):
        return [value]
    data, lengths = _announce(value, group)
    longest, here = max(lengths), dist.get_rank() == destination
    if longest == 0:
        return [None] * len(lengths) if here else None
    everyone = data.new_empty(len(lengths), longest) if here else None
    rows = None if everyone is None else list(everyone.unbind())
    with waits.on(waits.collective, "gather", data, group):
        dist.gather(_padded(data, longest), rows, dst=destination, group=group)
    return None if everyone is None else _decoded(everyone, lengths)


def broadcast(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The value of global rank ``source``, on every rank of the group (of the world for ``None``); collective.

    ``source`` gets its own object back. What the other ranks give does not matter, except in a process group of which
    only this rank exists (a rehearsal): all ranks are taken to hold what this one holds, so it gets its own back too.
    """
    if _alone(group):
        return value
    device = _device(group)
    sends = dist.get_rank() == source
    data = encode(value).to(device) if sends else torch.empty(0, dtype=torch.uint8, device=device)
    length = torch.tensor([data.numel() if sends else _NOT_SENT], device=device)
    with waits.on(waits.collective, "broadcast", length, group):
        dist.broadcast(length, source, group=group)
    size = int(length.item())
    if size == _NOT_SENT:
        data, sends = encode(value).to(device), True
    elif not sends:
        data = data.new_empty(size)
    if data.numel():
        with waits.on(waits.collective, "broadcast", data, group):
            dist.broadcast(data, source, group=group)
    return value if sends else decode(data)


def _alone(group: dist.ProcessGroup | None) -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors that ``group`` sends may lie: the CPU if its backends reach it, otherwise the current GPU."""
    group = group or dist.group.WORLD
    kinds = [torch.device(kind).type for kind in getattr(group, "_device_types", ())]
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def _announce(value: Any, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """This rank's bytes, and how many each rank has."""
    data = encode(value).to(_device(group))
    lengths = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=data.device)
    own = torch.tensor([data.numel()], device=data.device)
    with waits.on(waits.collective, "all_gather", own, group):
        dist.all_gather(list(lengths.split(1)), own, group=group)
    return data, lengths.tolist()


def _padded(data: Tensor, length: int) -> Tensor:
    if data.numel() == length:
        return data
    padded = data.new_zeros(length)
    padded[: data.numel()] = data
    return padded


def _decoded(everyone: Tensor, lengths: list[int]) -> list[Any]:
    rows = everyone.cpu()
    return [decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]
