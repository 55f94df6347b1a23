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

A sender does not wait for the receiver: it takes another block where the last one is not free yet. In collectives "is
free" is told with the next message in the other direction, if there is one soon. Both may have filled the socket with
notes for each other: whoever cannot write a message reads meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.mesh.watch import waits

_PACKET = struct.Struct("<iiqqi")  # kind, block, tag, bytes, a block that is free again
_MESSAGE, _FREE, _BLOCK = range(3)
_SMALLEST = 4096
_LOOK_MS = 50  # after which a thread looks whether another one has heard what it waits for
_UNTOLD = 2  # blocks that are free again, and that the other process does not know of


class PeerGone(ConnectionError, RuntimeError):
    """The other process has closed the channel, or has not sent or read anything within the timeout.

    A ``RuntimeError`` as well, as torch's own errors of the kind are.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        waits.mark(self)


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
        silent = 0
        while self._block.fetched < self._number:
            silent = self._channel.hear(silent)


class Expected:
    """A receive that was posted."""

    __slots__ = ("_channel", "_index", "_key", "_lazily", "_tensor")

    def __init__(self, channel: HostChannel, tensor: Tensor, key: tuple[int, int], lazily: bool) -> None:
        self._channel, self._tensor, self._key, self._lazily = channel, tensor, key, lazily
        self._index = -1

    def wait(self) -> None:
        """Wait for the message, and copy it into the tensor."""
        self._index = self._channel.await_block(self._tensor, self._key)
        address = self._channel.theirs[self._index].address
        ctypes.memmove(self._tensor.data_ptr(), address, self._tensor.nbytes)
        self.give_back()

    def borrow(self) -> Tensor:
        """Wait for the message; where it lies until :meth:`give_back`, shaped as the tensor, which is left alone."""
        self._index = self._channel.await_block(self._tensor, self._key)
        return self._channel.theirs[self._index].as_tensor(self._tensor)

    def give_back(self) -> None:
        """Let the sender use its block again."""
        self._channel.give_back(self._index, self._lazily)


class HostChannel:
    """Channel in both directions between this process and another one on the same host.

    Several threads may use it at once, as one waits for a message and another one sends.

    Args:
        connection: connected ``SOCK_SEQPACKET`` socket; the channel takes it over.
        peer: global rank of the other process.
        timeout_s: seconds without a packet after which waiting fails.

    Attributes:
        theirs: blocks that the other process writes.

    Raises:
        PeerGone: by every method that waits or writes.
    """

    def __init__(self, connection: socket.socket, peer: int, timeout_s: float) -> None:
        self.peer, self._timeout_s = peer, timeout_s
        connection.setblocking(False)
        self._socket = connection.detach()
        self._end = weakref.finalize(self, _close, self._socket, os.getpid())
        self._lock = threading.RLock()
        self._gone = False
        self._poll = self._poll_for(select.POLLIN)
        self._mine: list[_Block] = []
        self._free: dict[int, list[int]] = {}  # capacity -> blocks of this process
        self.theirs: list[_Block] = []
        self._announced = 0  # capacity of one of theirs, whose descriptor is behind the packet
        self._untold: list[int] = []  # those of them that are free again
        self._posted: Counter[int] = Counter()
        self._arrived: Counter[int] = Counter()
        self._messages: dict[tuple[int, int], tuple[int, int]] = {}  # (tag, number) -> (block, bytes)

    def close(self) -> None:
        """End the connection; whoever waits for a message by it, here or there, gets an error."""
        with self._lock:
            self._gone = True
            self._end()

    def send(self, tensor: Tensor, tag: int) -> Sent:
        """Copy a contiguous CPU tensor into shared memory, and notify the other process.

        Raises:
            ValueError: the tensor is not contiguous.
        """
        size = _contiguous(tensor).nbytes
        with self._lock:
            index = self._take_free(size)
            block = self._mine[index]
            ctypes.memmove(block.address, tensor.data_ptr(), size)
            block.sent += 1
            freed = self._untold.pop() if self._untold else -1
            self._write(_PACKET.pack(_MESSAGE, index, tag, size, freed))
            return Sent(self, block)

    def receive(self, tensor: Tensor, tag: int, *, lazily: bool = False) -> Expected:
        """Post a receive into a contiguous CPU tensor.

        Args:
            tensor: for the message.
            tag: its tag.
            lazily: whether the sender does not wait until it has been fetched, and may hear of it later.

        Raises:
            ValueError: the tensor is not contiguous.
        """
        with self._lock:
            number = self._posted[tag]
            self._posted[tag] = number + 1
        return Expected(self, _contiguous(tensor), (tag, number), lazily)

    def await_block(self, like: Tensor, key: tuple[int, int]) -> int:
        """Wait for a message.

        Args:
            like: has its shape and dtype.
            key: tag, and number among the messages of that tag.

        Returns:
            Number of its block.

        Raises:
            RuntimeError: the message has another size in bytes.
        """
        silent = 0
        while (found := self._messages.pop(key, None)) is None:
            silent = self.hear(silent)
        index, size = found
        if size != like.nbytes:
            raise RuntimeError(
                f"rank {self.peer} sent {size} bytes where {waits.numbers(like)} ({like.nbytes} bytes) was expected."
            )
        return index

    def give_back(self, index: int, lazily: bool) -> None:
        """Say that a block is free again, now or with a message to come."""
        with self._lock:
            self._untold.append(index)
            while self._untold and not self._gone and (len(self._untold) > _UNTOLD or not lazily):
                packet = _PACKET.pack(_FREE, self._untold[-1], 0, 0, -1)
                try:
                    os.write(self._socket, packet)
                except BlockingIOError:
                    if lazily:  # who does not wait for it may never read again
                        return
                    self._write_patiently(functools.partial(os.write, self._socket, packet))
                except (BrokenPipeError, ConnectionResetError):
                    return  # it has nothing left to send
                self._untold.pop()

    def hear(self, silent_ms: int) -> int:
        """Wait for a packet of the other process, and handle it; or return, as another thread may have heard it.

        Args:
            silent_ms: for how long nothing has come.

        Returns:
            The same, afterwards.
        """
        if self._gone:
            raise PeerGone(f"rank {self.peer} closed its connection.")
        if silent_ms > self._timeout_s * 1000:
            raise PeerGone(f"rank {self.peer} sent nothing for {self._timeout_s:g} s (`timeout`).")
        try:
            comes = self._poll.poll(_LOOK_MS)
        except RuntimeError:  # another thread waits by it
            comes = self._poll_for(select.POLLIN).poll(_LOOK_MS)
        return 0 if comes and self._read() else silent_ms + _LOOK_MS

    def _poll_for(self, events: int) -> Any:
        poll = select.poll()
        poll.register(self._socket, events)
        return poll

    def _read(self) -> bool:
        """Handle one packet, if there is one."""
        with self._lock:
            if self._announced:
                return self._take_block()
            try:
                packet = os.read(self._socket, _PACKET.size)
            except BlockingIOError:
                return False
            except ConnectionResetError:  # once, of a process that has left notes unread; what it sent is behind
                return True
            if not packet:
                self._gone = True
                return True
            kind, index, tag, size, freed = _PACKET.unpack(packet)
            if kind == _MESSAGE:
                number = self._arrived[tag]
                self._arrived[tag] = number + 1
                self._messages[tag, number] = index, size
            elif kind == _FREE:
                freed = index
            else:
                self._announced = size
            if freed >= 0:
                block = self._mine[freed]
                block.fetched += 1
                self._free[block.capacity].append(freed)
        return True

    def _take_free(self, size: int) -> int:
        """Index of a free block; sizes are rounded up to powers of two, so that varying sizes need few blocks."""
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length() if size else 0)
        free = self._free.setdefault(capacity, [])
        while not free and not self._gone and self._read():
            pass
        if free:
            return free.pop()
        descriptor = os.memfd_create("lightning_megatron")
        try:
            os.ftruncate(descriptor, capacity)
            self._mine.append(_Block(descriptor, capacity))
            self._write(_PACKET.pack(_BLOCK, 0, 0, capacity, -1))
            with socket.socket(fileno=os.dup(self._socket)) as connection:
                self._try(lambda: socket.send_fds(connection, [b"\0"], [descriptor]))
        finally:
            os.close(descriptor)
        return len(self._mine) - 1

    def _take_block(self) -> bool:
        """Take the descriptor of a block that was announced, if it is there; both may be about to send one."""
        with socket.socket(fileno=os.dup(self._socket)) as connection:
            try:
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True
        for descriptor in descriptors:
            self.theirs.append(_Block(descriptor, self._announced))
            os.close(descriptor)
        self._announced, self._gone = 0, not descriptors
        return True

    def _write(self, packet: bytes) -> None:
        if self._gone:
            raise PeerGone(f"rank {self.peer} closed its connection.")
        self._try(lambda: os.write(self._socket, packet))

    def _try(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except BlockingIOError:
            self._write_patiently(write)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGone(f"rank {self.peer} closed its connection.") from error

    def _write_patiently(self, write: Callable[[], Any]) -> None:
        """Write as soon as it fits into the socket, and read meanwhile."""
        poll, deadline = self._poll_for(select.POLLIN | select.POLLOUT), time.monotonic() + self._timeout_s
        with waits.on(lambda: waits.Waiting(f"rank {self.peer} to read what was sent to it", (self.peer,))):
            while time.monotonic() < deadline:
                poll.poll(_LOOK_MS)
                self._read()
                try:
                    write()
                except BlockingIOError:
                    continue
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise PeerGone(f"rank {self.peer} closed its connection.") from error
                return
        raise PeerGone(f"rank {self.peer} read nothing for {self._timeout_s:g} s (`timeout`).")


def _contiguous(tensor: Tensor) -> Tensor:
    """The tensor, whose memory is copied as it lies."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{waits.numbers(tensor)} with strides {tensor.stride()} is not contiguous; pass `tensor.contiguous()`."
        )
    return tensor


def _close(descriptor: int, process: int) -> None:
    """End the connection, which workers that this process has forked hold too."""
    if os.getpid() == process:
        with socket.socket(fileno=os.dup(descriptor)) as connection, suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    os.close(descriptor)
