"""The processes of this host that this one reaches through shared memory, whatever group a message is of.

Opened where processes connect, and closed where one fails. Until then messages between CPU processes of one host take
this way, from run to run; sender and receiver decide it alike, by the ranks and the size::

    ranks 0 and 1 on host a, 2 on host b

        0 ── 1   a channel, for messages of all groups
        0 ── 2   gloo

A rank that sends more than 8 MiB in a collective does so over gloo, which copies nothing: a large model's gradients and
weights, in buckets of 25 MB, are never in this memory as well.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import sys
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.host_channel import HostChannel

_MOST_BYTES = 8 << 20
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_CONNECT_S = 10.0
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
    if not _opened or like.nbytes * (group.size() - 1) > _MOST_BYTES or isinstance(like, FakeTensor):
        return None
    return _opened[0].ways(group)[rank]


def ways_of(group: dist.ProcessGroup) -> list[Way | None]:
    """The ways of messages of any length to the ranks of a group."""
    return _opened[0].ways(group) if _opened else [None] * group.size()


def reaches(group: dist.ProcessGroup, bytes_: int) -> bool:
    """Whether messages of this length go through memory to all other ranks of a group."""
    known = ways_of(group) if bytes_ * (group.size() - 1) <= _MOST_BYTES else []
    return bool(known) and all(way is not None for rank, way in enumerate(known) if rank != group.rank())


def open_channels(group: dist.ProcessGroup) -> dict[int, HostChannel]:
    """Open channels to the ranks of a gloo group that run on this host, with the group's timeout.

    Collective over the group.

    Returns:
        Global rank -> channel. Empty on platforms without anonymous files; ranks that this process cannot reach (in
        another container of the host, for instance) are absent.
    """
    own, size = group.rank(), group.size()
    listener = _listen(size)
    try:
        places = objects.gather(None if listener is None else (_host(), listener.getsockname()), group)
        connected = {} if listener is None else _connect(places, own)
        reached = objects.gather(sorted(connected), group)
        if listener is not None:
            connected |= _accept(listener, {rank for rank in range(own + 1, size) if own in reached[rank]})
        if not _all_reach_all(places, reached):  # some of a group would send what others do not expect
            for connection in connected.values():
                connection.close()
            connected = {}
    finally:
        if listener is not None:
            listener.close()
    ranks = dist.get_process_group_ranks(group)
    backend: Any = group._get_backend(torch.device("cpu"))
    timeout_s = backend.options._timeout.total_seconds()
    return {ranks[rank]: HostChannel(connection, ranks[rank], timeout_s) for rank, connection in connected.items()}


def _all_reach_all(places: Sequence[Any], reached: Sequence[Sequence[int]]) -> bool:
    """Whether each process has reached all lower ranks on its host.

    Args:
        places: host and address of each rank; ``None`` for one that nobody can reach.
        reached: by each rank.
    """
    hosts = [None if place is None else place[0] for place in places]
    return all(
        hosts[rank] is None or list(ranks) == [other for other in range(rank) if hosts[other] == hosts[rank]]
        for rank, ranks in enumerate(reached)
    )


def _listen(backlog: int) -> socket.socket | None:
    """A listening socket without a path in the file system.

    ``None`` where such sockets or anonymous files are not available: on platforms other than Linux, or if not
    permitted.
    """
    if sys.platform != "linux":
        return None
    try:
        os.close(os.memfd_create("lightning_megatron"))
        _host()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.settimeout(_CONNECT_S)
            listener.bind(f"\0lightning_megatron-{uuid.uuid4()}")
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
    except OSError:
        return None
    return listener


def _host() -> tuple[str, ...]:
    """Identity of the host, namespaces and user: equal for processes that can, and may, reach each other's sockets."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/user"), str(os.getuid())


def _connect(places: Sequence[Any], own: int) -> dict[int, socket.socket]:
    """Connect to the lower ranks that are on this rank's host: rank -> connection."""
    connected = {}
    for rank, place in enumerate(places[:own]):
        if place is None or place[0] != places[own][0]:
            continue
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_CONNECT_S)
        try:
            connection.connect(place[1])
            connection.sendall(own.to_bytes(4, "little"))
        except OSError:
            connection.close()
            continue
        connected[rank] = connection
    return connected


def _accept(listener: socket.socket, expected: set[int]) -> dict[int, socket.socket]:
    """Accept the connections of ``expected`` ranks, and refuse those of other users' processes: rank -> connection."""
    connected: dict[int, socket.socket] = {}
    while expected - connected.keys():
        connection, _ = listener.accept()
        _, user, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user != os.getuid():
            connection.close()
            continue
        connected[int.from_bytes(connection.recv(4), "little")] = connection
    return connected
