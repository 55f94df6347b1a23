"""Point-to-point messages, over shared memory of a host or over the process group's backend.

Callers send and receive tensors by rank in the group and by tag, and wait for a :class:`Message`. Between CPU processes
of one host that have connected (:mod:`~lightning_megatron.mesh.messages.host_channel`), messages go through shared
memory; all others go through the backend (gloo, NCCL)::

    group of ranks 0, 1 on host a and 2, 3 on host b, seen from rank 0

        send(x, 1)   host channel: ``x`` is copied at once, and may be changed right away
        send(x, 2)   gloo: ``x`` is kept alive, and must not change until the message has been waited for
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.messages.host_channel import HostChannel, open_channels
from lightning_megatron.mesh.watch import waits


class Message:
    """A send or receive under way.

    Args:
        work: to wait for.
        peer: the other rank, in the group.
        group: the group.
        tensor: kept alive until the wait is over; ``None`` if the sent tensor has been copied.
        arrives: whether this rank receives it.

    Attributes:
        work: for callers that wait for several messages and say so themselves; ``None`` once it was waited for.
    """

    __slots__ = ("_arrives", "_group", "_peer", "_tensor", "work")

    def __init__(self, work: Any, peer: int, group: dist.ProcessGroup, tensor: Tensor | None, arrives: bool) -> None:
        self.work, self._peer, self._group = work, peer, group
        self._tensor, self._arrives = tensor, arrives

    def wait(self) -> None:
        """Wait until the tensor has arrived, or the peer has fetched it (on a GPU: make the current stream wait)."""
        if self.work is not None:
            with waits.on(self.told):
                self.work.wait()
        self.work = self._tensor = None

    def told(self) -> waits.Waiting | None:
        """Description of the wait, for reports of hanging ranks; ``None`` if it is over."""
        if not self._arrives:
            return _fetching(self._group, self._peer)
        rank, tensor = dist.get_global_rank(self._group, self._peer), self._tensor
        if tensor is None:  # the wait ended after the report began
            return None
        return waits.Waiting(f"message of {waits.numbers(tensor)} from rank {rank}", (rank,))


class Transport:
    """Sends and receives messages between this rank and the others of a group.

    The n-th message of a tag matches the n-th receive of that tag. NCCL ignores tags, and matches in the order of
    calls.

    Args:
        group: the process group.
        channels: rank in the group -> channel to that process, for processes of this host.
    """

    __slots__ = ("_channels", "group")

    def __init__(self, group: dist.ProcessGroup, channels: Mapping[int, HostChannel] | None = None) -> None:
        self.group = group
        self._channels = dict(channels or {})

    @classmethod
    def through_memory(cls, group: dist.ProcessGroup) -> Transport:
        """A transport with shared-memory channels to all ranks of this host; collective over the gloo group."""
        channels = open_channels(group)
        return cls(group, {dist.get_group_rank(group, rank): channel for rank, channel in channels.items()})

    @property
    def posts_ahead(self) -> bool:
        """Whether receives may be posted in another order than they are sent; NCCL matches by order alone."""
        return bool(dist.get_backend(self.group) != "nccl")

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Message:
        """Start sending a contiguous tensor to rank ``to`` of the group; it must not change until it is waited for."""
        channel = self._channels.get(to)
        if channel is not None:
            with waits.on(_fetching, self.group, to):
                return Message(channel.send(tensor, tag), to, self.group, None, False)
        return send(self.group, tensor, to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Message:
        """Post a receive from rank ``source`` of the group into a contiguous tensor."""
        channel = self._channels.get(source)
        if channel is not None:
            return Message(channel.receive(tensor, tag), source, self.group, tensor, True)
        return receive(self.group, tensor, source, tag)

    def close(self) -> None:
        """Close the channels to processes of this host; processes that wait for this one get a ``PeerGone`` error."""
        for channel in self._channels.values():
            channel.close()
        self._channels = {}


def send(group: dist.ProcessGroup, tensor: Tensor, to: int, tag: int = 0) -> Message:
    """Start sending through the backend; arguments as of :meth:`Transport.send`.

    ``dist.isend`` first looks the default group and its ranks up several times, which takes longer than a small
    message.
    """
    try:
        work = group.send([_real(tensor)], to, tag)
    except BaseException as error:  # it does not block, but the peer may be gone
        waits.mark(error)
        raise
    return Message(work, to, group, tensor, False)


def receive(group: dist.ProcessGroup, tensor: Tensor, source: int, tag: int = 0) -> Message:
    """Post a receive through the backend; arguments as of :meth:`Transport.receive`."""
    return Message(group.recv([_real(tensor)], source, tag), source, group, tensor, True)


def _real(tensor: Tensor) -> Tensor:
    """The tensor as backends take it, who know no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _fetching(group: dist.ProcessGroup, peer: int) -> waits.Waiting:
    rank = dist.get_global_rank(group, peer)
    return waits.Waiting(f"rank {rank} to fetch what was sent to it", (rank,))
