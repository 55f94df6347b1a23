"""Point-to-point messages, over shared memory of a host or over the process group's backend.

Callers send and receive tensors by rank in the group and by tag, and wait for a :class:`Message`. Between CPU processes
of one host that have connected (:mod:`~lightning_megatron.mesh.messages.host_peers`), messages go through shared
memory; all others go through the backend (gloo, NCCL)::

    group of ranks 0, 1 on host a and 2, 3 on host b, seen from rank 0

        send(x, 1)   host channel: ``x`` is copied at once, and may be changed right away
        send(x, 2)   gloo: ``x`` is kept alive, and must not change until the message has been waited for
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.messages import host_peers
from lightning_megatron.mesh.messages.host_channel import Expected
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

    def borrow(self) -> Tensor:
        """Wait for the tensor; where it lies until :meth:`give_back`, which may be memory of two processes.

        Callers say that they wait.
        """
        if isinstance(self.work, Expected):
            return self.work.borrow()
        tensor = cast(Tensor, self._tensor)
        self.wait()
        return tensor

    def give_back(self) -> None:
        """Be through with a tensor that was borrowed."""
        if isinstance(self.work, Expected):
            self.work.give_back()
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
        through_memory: whether messages to processes of this host that are connected
            (:mod:`~lightning_megatron.mesh.messages.host_peers`) go through shared memory, however long.
    """

    __slots__ = ("_ways", "group")

    def __init__(self, group: dist.ProcessGroup, *, through_memory: bool = True) -> None:
        self.group = group
        self._ways = host_peers.ways_of(group) if through_memory else [None] * group.size()

    @property
    def posts_ahead(self) -> bool:
        """Whether receives may be posted in another order than they are sent; NCCL matches by order alone."""
        return bool(dist.get_backend(self.group) != "nccl")

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Message:
        """Start sending a contiguous tensor to rank ``to`` of the group; it must not change until it is waited for."""
        way = self._ways[to]
        if way is None:
            return _send(self.group, tensor, to, tag)
        return Message(way.channel.send(tensor, way.first_tag + tag), to, self.group, None, False)

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Message:
        """Post a receive from rank ``source`` of the group into a contiguous tensor."""
        way = self._ways[source]
        if way is None:
            return _receive(self.group, tensor, source, tag)
        return Message(way.channel.receive(tensor, way.first_tag + tag), source, self.group, tensor, True)


def send(group: dist.ProcessGroup, tensor: Tensor, to: int, tag: int = 0) -> Message:
    """Start sending a message of a collective; arguments as of :meth:`Transport.send`.

    Long ones go through the backend, which does not copy them. What went through memory may be changed at once.
    """
    way = host_peers.way_of(group, to, tensor)
    if way is None:
        return _send(group, tensor, to, tag)
    for hear in host_peers.listeners:
        hear(group)
    way.channel.send(tensor, way.first_tag + tag)
    return _THROUGH


def receive(group: dist.ProcessGroup, tensor: Tensor, source: int, tag: int = 0) -> Message:
    """Post a receive of such a message; arguments as of :meth:`Transport.receive`."""
    way = host_peers.way_of(group, source, tensor)
    if way is None:
        return _receive(group, tensor, source, tag)
    return Message(way.channel.receive(tensor, way.first_tag + tag, lazily=True), source, group, tensor, True)


def expect(group: dist.ProcessGroup, like: Tensor, source: int, tag: int = 0) -> Message:
    """Post a receive of what is shaped like a contiguous tensor, to be borrowed (:meth:`Message.borrow`)."""
    way = host_peers.way_of(group, source, like)
    if way is None:
        return _receive(group, torch.empty_like(like), source, tag)
    return Message(way.channel.receive(like, way.first_tag + tag, lazily=True), source, group, like, True)


def _send(group: dist.ProcessGroup, tensor: Tensor, to: int, tag: int) -> Message:
    """Send through the backend.

    ``dist.isend`` first looks the default group and its ranks up several times, which takes longer than a small
    message.
    """
    try:
        work = group.send([_real(tensor)], to, tag)
    except BaseException as error:  # it does not block, but the peer may be gone
        waits.mark(error)
        raise
    return Message(work, to, group, tensor, False)


def _receive(group: dist.ProcessGroup, tensor: Tensor, source: int, tag: int) -> Message:
    return Message(group.recv([_real(tensor)], source, tag), source, group, tensor, True)


_THROUGH = Message(None, -1, cast(Any, None), None, False)
"""A message that is not to be waited for."""


def _real(tensor: Tensor) -> Tensor:
    """The tensor as backends take it, who know no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _fetching(group: dist.ProcessGroup, peer: int) -> waits.Waiting:
    rank = dist.get_global_rank(group, peer)
    return waits.Waiting(f"rank {rank} to fetch what was sent to it", (rank,))
