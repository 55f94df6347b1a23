"""The one seam between messages and what carries them: memory of this host, or the process group's backend.

Everything above sends and receives tensors by the rank in a group and a tag, and waits for a :class:`Message`. Where
CPU processes of one host have connected (:mod:`~lightning_megatron.mesh.messages.host_channel`), a message is copied
through memory that both have mapped; all others go through the backend (gloo, NCCL)::

    group of ranks 0, 1 on host a and 2, 3 on host b, seen from rank 0

        send(x, 1)   host channel: copied at once, ``x`` may be changed right away
        send(x, 2)   gloo: ``x`` is kept alive, and must stay as it is, until the message has been waited for
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.messages.host_channel import HostChannel, open_channels
from lightning_megatron.mesh.watch import waits


class Message:
    """A tensor on its way to or from another rank.

    Args:
        work: what to wait for.
        peer: the other rank, in the group.
        group: the group.
        tensor: kept alive until then; ``None`` where what is sent has been copied.
        arrives: whether this rank receives it.
    """

    __slots__ = ("_arrives", "_group", "_peer", "_tensor", "_work")

    def __init__(self, work: Any, peer: int, group: dist.ProcessGroup, tensor: Tensor | None, arrives: bool) -> None:
        self._work, self._peer, self._group = work, peer, group
        self._tensor, self._arrives = tensor, arrives

    def wait(self) -> None:
        """Wait until it has arrived, or was fetched (on a GPU: make the current stream wait)."""
        if self._work is not None:
            with waits.on(self.told):
                self._work.wait()
        self._work = self._tensor = None

    def told(self) -> waits.Waiting | None:
        """The wait in words."""
        if not self._arrives:
            return _fetching(self._group, self._peer)
        rank, tensor = dist.get_global_rank(self._group, self._peer), self._tensor
        if tensor is None:  # it has just arrived
            return None
        return waits.Waiting(f"message of {waits.numbers(tensor)} from rank {rank}", (rank,))


class Transport:
    """Messages between this rank and the others of a group.

    The n-th message of a tag goes to the n-th receive of that tag (NCCL: in the order of calls, whatever the tag).

    Args:
        group: its ranks.
        channels: by rank in the group, connections to processes of this host.
    """

    __slots__ = ("_channels", "group")

    def __init__(self, group: dist.ProcessGroup, channels: Mapping[int, HostChannel] | None = None) -> None:
        self.group = group
        self._channels = dict(channels or {})

    @classmethod
    def through_memory(cls, group: dist.ProcessGroup) -> Transport:
        """A transport that uses memory to all ranks of this host; collective over the group, which must be gloo's."""
        channels = open_channels(group)
        return cls(group, {dist.get_group_rank(group, rank): channel for rank, channel in channels.items()})

    @property
    def posts_ahead(self) -> bool:
        """Whether a receive may be posted before its turn; NCCL matches by order alone."""
        return bool(dist.get_backend(self.group) != "nccl")

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Message:
        """Start sending a contiguous tensor to rank ``to`` of the group."""
        channel = self._channels.get(to)
        with waits.on(_fetching, self.group, to):
            if channel is not None:
                return Message(channel.send(tensor, tag), to, self.group, None, False)
            work = dist.isend(tensor, group=self.group, tag=tag, group_dst=to)
        return Message(work, to, self.group, tensor, False)

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Message:
        """Post a receive from rank ``source`` of the group into a contiguous tensor."""
        channel = self._channels.get(source)
        if channel is not None:
            return Message(channel.receive(tensor, tag), source, self.group, tensor, True)
        work = dist.irecv(tensor, group=self.group, tag=tag, group_src=source)
        return Message(work, source, self.group, tensor, True)

    def close(self) -> None:
        """Close the connections to processes of this host; those that wait for this one learn it."""
        for channel in self._channels.values():
            channel.close()
        self._channels = {}


def _fetching(group: dist.ProcessGroup, peer: int) -> waits.Waiting:
    rank = dist.get_global_rank(group, peer)
    return waits.Waiting(f"rank {rank} to fetch what was sent to it", (rank,))
