"""Collectives on Python values, which are pickled.

The length of the pickled value is sent first, with its bytes if they are few; or else these follow. So a collective in
which all values are small costs one message. Example: ranks 0 to 3 of a group, where only rank 2 has a value::

    heads     [0 ..., 0 ..., 17 and bytes, 0 ...]    gather(value)        -> [None, None, "out of memory", None], on all
    bytes     (of more than 248: of all, padded)     gather_to(value, 0)  -> the same list on rank 0, None elsewhere
                                                     broadcast(value, 2)  -> "out of memory", on all

Received values are copies, in the order of ranks in the group. Tensors inside of them are pickled with their device;
move them to the CPU first. The bytes are sent from a device that the group's backend supports: the current GPU for a
group with NCCL only. Only bytes sent by ranks of this run are unpickled.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.watch import waits

_NOT_SENT = -1
_LENGTH, _HEAD = 8, 256
"""Bytes of the length, and of the first message."""


def encode(value: Any) -> Tensor:
    """Pickle ``value`` into a CPU tensor, uint8 [length]; length 0 for ``None``."""
    if value is None:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def decode(data: Tensor) -> Any:
    """Unpickle the value of ``data``, uint8 [length], on any device."""
    return pickle.loads(data.cpu().numpy().data) if data.numel() else None


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """All-gather values: every rank gets all values, in order of rank. Collective; ``None`` is the world."""
    if _alone(group):
        return [value]
    data, lengths, heads = _announce(value, group)
    longest = max(lengths)
    if longest <= _HEAD - _LENGTH:
        return _decoded(heads, lengths)
    everyone = data.new_empty(len(lengths), longest)
    with waits.on(waits.collective, "all_gather", data, group):
        dist.all_gather(list(everyone.unbind()), _padded(data, longest), group=group)
    return _decoded(everyone, lengths)


def gather_to(value: Any, destination: int, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Gather values on global rank ``destination``, in order of rank; ``None`` on other ranks. Collective."""
    if _alone(group):
        return [value]
    data, lengths, heads = _announce(value, group)
    longest, here = max(lengths), dist.get_rank() == destination
    if longest <= _HEAD - _LENGTH:
        return _decoded(heads, lengths) if here else None
    everyone = data.new_empty(len(lengths), longest) if here else None
    rows = None if everyone is None else list(everyone.unbind())
    with waits.on(waits.collective, "gather", data, group):
        dist.gather(_padded(data, longest), rows, dst=destination, group=group)
    return None if everyone is None else _decoded(everyone, lengths)


def broadcast(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Broadcast the value of global rank ``source`` to every rank of the group (``None`` is the world). Collective.

    ``source`` gets its own object back. The values of the other ranks are ignored, except in a rehearsal, whose process
    group has only this rank: there every rank gets its own value back.
    """
    if _alone(group):
        return value
    device = device_of(group)
    sends = dist.get_rank() == source
    data = encode(value).to(device) if sends else torch.empty(0, dtype=torch.uint8, device=device)
    head = _head(data, data.numel() if sends else _NOT_SENT)
    with waits.on(waits.collective, "broadcast", head, group):
        dist.broadcast(head, source, group=group)
    size, few = _length(head := head.cpu()), head[_LENGTH:]
    if size == _NOT_SENT:
        data, sends = encode(value).to(device), True
    elif not sends:
        data = few[:size] if size <= len(few) else data.new_empty(size)
    if data.numel() > len(few):
        with waits.on(waits.collective, "broadcast", data, group):
            dist.broadcast(data, source, group=group)
    return value if sends else decode(data)


def _alone(group: dist.ProcessGroup | None) -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Device of tensors that ``group`` can send: the CPU if one of its backends supports it, else the current GPU."""
    group = group or dist.group.WORLD
    kinds = [torch.device(kind).type for kind in getattr(group, "_device_types", ())]
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def _announce(value: Any, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int], Tensor]:
    """Pickle ``value``, and all-gather the heads: this rank's bytes, the number of bytes of each rank, and their first
    ones [group, 248].
    """
    data = encode(value).to(device_of(group))
    own, heads = _head(data, data.numel()), data.new_empty(dist.get_world_size(group), _HEAD)
    with waits.on(waits.collective, "all_gather", own, group):
        dist.all_gather(list(heads.unbind()), own, group=group)
    heads = heads.cpu()
    return data, [_length(head) for head in heads], heads[:, _LENGTH:]


def _head(data: Tensor, length: int) -> Tensor:
    """The first message of ``data``: a length, and as many bytes as there is room for, uint8 [256]."""
    head = data.new_zeros(_HEAD)
    head[:_LENGTH].view(torch.int64).fill_(length)
    few = data[: _HEAD - _LENGTH]
    head[_LENGTH : _LENGTH + len(few)] = few
    return head


def _length(head: Tensor) -> int:
    return int(head[:_LENGTH].view(torch.int64))


def _padded(data: Tensor, length: int) -> Tensor:
    if data.numel() == length:
        return data
    padded = data.new_zeros(length)
    padded[: data.numel()] = data
    return padded


def _decoded(everyone: Tensor, lengths: list[int]) -> list[Any]:
    rows = everyone.cpu()
    return [decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]
