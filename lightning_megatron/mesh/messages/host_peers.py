"""The processes of this host that this one reaches through shared memory, whatever group a message is of.

Opened where processes connect, and closed where one fails. Until then messages between CPU processes of one host take
this way, from run to run; sender and receiver decide it alike, by the ranks and the size::

    ranks 0 and 1 on host a, 2 on host b

        0 ── 1   a channel, for messages of all groups; those above 8 MiB go over gloo, without being copied
        0 ── 2   gloo
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.host_channel import HostChannel, open_channels

_MOST_BYTES = 8 << 20
_TAGS = (1 << 63) - 1

listeners: list[Callable[[dist.ProcessGroup], None]] = []
"""Hear the group of each message that goes through memory, of which torch has no operator."""


class Way(NamedTuple):
    """The way of messages of a group to one of its ranks.

    Attributes:
        channel: to its process.
        first_tag: stands for the group's tag 0.
    """

    channel: HostChannel
    first_tag: int


class HostPeers:
    """Channels to the other processes of this host.

    Args:
        world: all processes.
        channels: by global rank.
    """

    def __init__(self, world: dist.ProcessGroup, channels: Mapping[int, HostChannel]) -> None:
        self._world, self._channels = weakref.ref(world), channels
        self._ways: dict[str, list[Way | None]] = {}

    def ways(self, group: dist.ProcessGroup) -> list[Way | None]:
        """The ways to the ranks of a group; ``None`` for gloo's."""
        known = self._ways.get(group.group_name)
        if known is None:
            first = int.from_bytes(hashlib.blake2b(group.group_name.encode(), digest_size=8).digest()) & _TAGS >> 1
            channels = [self._channels.get(other) for other in dist.get_process_group_ranks(group)]
            known = [None if channel is None else Way(channel, first) for channel in channels]
            self._ways[group.group_name] = known
        return known

    def serves(self, world: dist.ProcessGroup) -> bool:
        """Whether these processes are still those of the world."""
        return self._world() is world

    def close(self) -> None:
        """Close the channels; processes that wait for this one get an error."""
        for channel in self._channels.values():
            channel.close()


_opened: list[HostPeers] = []


def open_peers() -> None:
    """Open channels to the processes of this host, as far as an earlier run has not; collective over the world, whose
    tensors are on the CPU.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1 or dist.get_backend() != "gloo":
        return
    if not all(objects.gather(bool(_opened) and _opened[0].serves(world), world)):
        close_peers()
        _opened.append(HostPeers(world, open_channels(world)))


def close_peers() -> None:
    """Close them where this rank has failed; where they are not open, do nothing."""
    while _opened:
        _opened.pop().close()


def way_of(group: dist.ProcessGroup, rank: int, like: Tensor) -> Way | None:
    """The way of a message to or from a rank of a group; ``None`` if its backend is to take it.

    Args:
        group: the message is of.
        rank: of the other process, in the group.
        like: as long as the message. One without memory is no message, which the backend knows.
    """
    if not _opened or like.nbytes > _MOST_BYTES or isinstance(like, FakeTensor):
        return None
    return _opened[0].ways(group)[rank]


def ways_of(group: dist.ProcessGroup) -> list[Way | None]:
    """The ways of messages of any length to the ranks of a group."""
    return _opened[0].ways(group) if _opened else [None] * group.size()


def reaches(group: dist.ProcessGroup, bytes_: int) -> bool:
    """Whether messages of this length go through memory to all other ranks of a group."""
    known = ways_of(group) if bytes_ <= _MOST_BYTES else []
    return bool(known) and all(way is not None for rank, way in enumerate(known) if rank != group.rank())
