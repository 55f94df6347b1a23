"""Messages between two processes of one host, through shared memory.

gloo sends through the kernel's network stack, which costs 0.13 ms of CPU time per small message on both the sender and
the receiver, besides gloo's own threads. Here the sender copies a tensor into a block of memory that both processes
have mapped. A socket carries the notification that the block is filled, and the answer that it is free again::

    rank 0   copy ──▶ ┌─────────┐ ──▶ copy   rank 1
             note ───▶│ socket  │───▶ wakes
           is free ◀──│         │◀─── answer
                      └─────────┘

Blocks are anonymous files whose descriptors are sent over the socket too. They have no name, do not count against the
quota of ``/dev/shm``, and are freed when the processes end, however they end. Receives may be posted ahead; the n-th
message of a tag matches the n-th receive of that tag, as over gloo.

A sender does not wait for the receiver: it takes another block where the last one is not free yet. Both may have filled
the socket with notes for each other: whoever cannot write a message reads meanwhile, and "is free" is told later.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import socket
import struct
import sys
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.watch.waits import numbers

_PACKET = struct.Struct("<iiqq")  # kind, block, tag, bytes
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_MESSAGE, _FREE, _BLOCK = range(3)
_SMALLEST = 4096
_CONNECT_S = 10.0
_LOOK_MS = 50  # after which a thread looks whether another one has heard what it waits for


class PeerGone(ConnectionError):
    """The other process has closed the channel, or has not sent or read anything within the timeout."""


class _Block:
    """A block of memory that both processes have mapped.

    Attributes:
        capacity: size in bytes.
        sent: number of messages written to it so far.
        fetched: number of messages that the other process has copied out of it so far.
        address: of its first byte in this process.
    """

    def __init__(self, descriptor: int, capacity: int) -> None:
        self.capacity, self.sent, self.fetched = capacity, 0, 0
        self._map = mmap.mmap(descriptor, capacity)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def as_tensor(self, like: Tensor) -> Tensor:
        """The message in it, which has the shape and dtype of ``like``."""
        return torch.frombuffer(self._map, dtype=like.dtype, count=like.numel()).view(like.shape)


class Sent:
    """A message that was sent; its tensor has been copied and may be changed."""

    def __init__(self, channel: HostChannel, block: _Block) -> None:
        self._channel, self._block, self._number = channel, block, block.sent

    def wait(self) -> None:
        """Wait until the other process has copied it."""
        self._channel.hear_until(lambda: self._block.fetched >= self._number)


class Expected:
    """A receive that was posted."""

    def __init__(self, channel: HostChannel, tensor: Tensor, tag: int, number: int) -> None:
        self._channel, self._tensor, self._key = channel, tensor, (tag, number)

    def wait(self) -> None:
        """Wait for the message, and copy it into the tensor."""
        self._channel.fetch(self._tensor, self._key)

    @contextmanager
    def borrowed(self) -> Iterator[Tensor]:
        """Wait for the message, and lend it where it lies, shaped as the tensor, which is left alone."""
        with self._channel.borrowed(self._tensor, self._key) as message:
            yield message


class HostChannel:
    """Channel in both directions between this process and another one on the same host.

    Several threads may use it at once, as one waits for a message and another one sends.

    Args:
        connection: connected ``SOCK_SEQPACKET`` socket; the channel takes it over.
        peer: global rank of the other process.
        timeout_s: seconds without a packet after which waiting fails.

    Raises:
        PeerGone: by every method that waits.
    """

    def __init__(self, connection: socket.socket, peer: int, timeout_s: float) -> None:
        self.peer, self._timeout_s = peer, timeout_s
        connection.setblocking(False)
        self._socket = connection.detach()
        self._end = weakref.finalize(self, _close, self._socket, os.getpid())
        self._freed: list[int] = []
        self._lock = threading.RLock()
        self._gone = False
        self._mine: list[_Block] = []
        self._theirs: list[_Block] = []
        self._posted: Counter[int] = Counter()
        self._arrived: Counter[int] = Counter()
        self._messages: dict[tuple[int, int], tuple[int, int]] = {}  # (tag, number) -> (block, bytes)

    def close(self) -> None:
        """End the connection; whoever waits for a message by it, here or there, gets an error."""
        with self._lock:
            self._gone = True
            self._end()

    def send(self, tensor: Tensor, tag: int) -> Sent:
        """Copy a contiguous CPU tensor into shared memory, and notify the other process."""
        with self._lock:
            self._drain()
            index = self._free_block(tensor.nbytes)
            block = self._mine[index]
            ctypes.memmove(block.address, tensor.data_ptr(), tensor.nbytes)
            block.sent += 1
            self._tell(_MESSAGE, index, tag, tensor.nbytes)
            return Sent(self, block)

    def receive(self, tensor: Tensor, tag: int) -> Expected:
        """Post a receive into a contiguous CPU tensor."""
        with self._lock:
            number = self._posted[tag]
            self._posted[tag] += 1
        return Expected(self, tensor, tag, number)

    def fetch(self, tensor: Tensor, key: tuple[int, int]) -> None:
        """Wait for a message, and copy it into a contiguous CPU tensor.

        Args:
            tensor: overwritten.
            key: tag, and number among the messages of that tag.

        Raises:
            RuntimeError: the message has another size in bytes than the tensor.
        """
        index = self._awaited(tensor, key)
        ctypes.memmove(tensor.data_ptr(), self._theirs[index].address, tensor.nbytes)
        self._give_back(index)

    @contextmanager
    def borrowed(self, like: Tensor, key: tuple[int, int]) -> Iterator[Tensor]:
        """Wait for a message, and lend it where it lies until the other process gets its block back.

        Args:
            like: has its shape and dtype.
            key: tag, and number among the messages of that tag.

        Raises:
            RuntimeError: the message has another size in bytes.
        """
        index = self._awaited(like, key)
        yield self._theirs[index].as_tensor(like)
        self._give_back(index)

    def hear_until(self, there: Callable[[], bool]) -> None:
        """Handle what the other process tells until ``there`` says that all has been heard."""
        self._drain()
        deadline = time.monotonic() + self._timeout_s
        while not there():
            if self._gone:
                raise PeerGone(f"rank {self.peer} closed its connection.")
            if time.monotonic() > deadline:
                raise PeerGone(f"rank {self.peer} sent nothing for {self._timeout_s:g} s (`timeout`).")
            if self._comes(select.POLLIN):
                self._drain()

    def _comes(self, events: int) -> bool:
        """Wait a little until the socket can be read, or written."""
        poll = select.poll()  # one that two threads wait by is an error
        poll.register(self._socket, events)
        return bool(poll.poll(_LOOK_MS))

    def _awaited(self, like: Tensor, key: tuple[int, int]) -> int:
        """Wait for a message as long as ``like``; gives its block."""
        if key not in self._messages:
            self.hear_until(lambda: key in self._messages)
        index, size = self._messages.pop(key)
        if size != like.nbytes:
            raise RuntimeError(
                f"rank {self.peer} sent {size} bytes where {numbers(like)} ({like.nbytes} bytes) was expected."
            )
        return index

    def _give_back(self, index: int) -> None:
        """Say that a block is free again, now or later: its sender may never read again, and has other blocks."""
        with self._lock:
            self._freed.append(index)
            self._tell_freed()

    def _tell_freed(self) -> None:
        while self._freed and not self._gone:
            try:
                os.write(self._socket, _PACKET.pack(_FREE, self._freed[0], 0, 0))
            except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                return
            del self._freed[0]

    def _drain(self) -> None:
        """Handle all packets that are there."""
        with self._lock:
            self._tell_freed()
            while not self._gone:
                try:
                    packet = os.read(self._socket, _PACKET.size)
                except BlockingIOError:
                    return
                except (
                    ConnectionResetError
                ):  # said once of a process that has left notes unread; what it sent is behind
                    continue
                self._gone = not packet
                if packet:
                    self._handle(*_PACKET.unpack(packet))

    def _handle(self, kind: int, index: int, tag: int, size: int) -> None:
        if kind == _FREE:
            self._mine[index].fetched += 1
        elif kind == _MESSAGE:
            self._messages[tag, self._arrived[tag]] = index, size
            self._arrived[tag] += 1
        else:
            self._take_block(size)

    def _free_block(self, size: int) -> int:
        """Index of a free block; sizes are rounded up to powers of two, so that varying sizes need few blocks."""
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length() if size else 0)
        for index, block in enumerate(self._mine):
            if block.capacity == capacity and block.fetched == block.sent:
                return index
        descriptor = os.memfd_create("lightning_megatron")
        try:
            os.ftruncate(descriptor, capacity)
            self._mine.append(_Block(descriptor, capacity))
            self._tell(_BLOCK, 0, 0, capacity)
            with socket.socket(fileno=os.dup(self._socket)) as connection:
                self._patiently(lambda: socket.send_fds(connection, [b"\0"], [descriptor]))
        finally:
            os.close(descriptor)
        return len(self._mine) - 1

    def _take_block(self, capacity: int) -> None:
        with socket.socket(fileno=os.dup(self._socket)) as connection:
            connection.settimeout(self._timeout_s)  # its descriptor is behind the packet
            _, (descriptor,), _, _ = socket.recv_fds(connection, 1, 1)
        self._theirs.append(_Block(descriptor, capacity))
        os.close(descriptor)

    def _tell(self, kind: int, index: int, tag: int, size: int) -> None:
        packet = _PACKET.pack(kind, index, tag, size)
        self._patiently(lambda: os.write(self._socket, packet))

    def _patiently(self, write: Callable[[], Any]) -> None:
        """Write what fits into the socket as a whole, as soon as it does."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            if self._gone:
                raise PeerGone(f"rank {self.peer} closed its connection.")
            try:
                write()
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise PeerGone(f"rank {self.peer} read nothing for {self._timeout_s:g} s (`timeout`).") from error
                self._comes(select.POLLIN | select.POLLOUT)
                self._drain()
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerGone(f"rank {self.peer} closed its connection.") from error
            else:
                return


def _close(descriptor: int, process: int) -> None:
    """End the connection, which workers that this process has forked hold too."""
    if os.getpid() == process:
        with socket.socket(fileno=os.dup(descriptor)) as connection, suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    os.close(descriptor)


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
    finally:
        if listener is not None:
            listener.close()
    ranks = dist.get_process_group_ranks(group)
    backend: Any = group._get_backend(torch.device("cpu"))
    timeout_s = backend.options._timeout.total_seconds()
    return {ranks[rank]: HostChannel(connection, ranks[rank], timeout_s) for rank, connection in connected.items()}


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
