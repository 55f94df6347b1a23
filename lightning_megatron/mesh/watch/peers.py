"""The processes of the ranks on this host: which of them has ended, and how.

A rank that is killed says nothing. Its neighbours can still know: the kernel tells a process when another one ends, and
on most systems with which signal or exit code. So every rank writes its process into the store, and looks after those
that are on its host; a host that disappears as a whole is noticed by its connections instead.

::

    rank 1  SIGKILL          rank 0  poll ─ ended by SIGKILL ─▶ store ─▶ all ranks
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO with the first, 64 bytes long, form of its answer
_HAS_EXIT = 1 << 3  # PIDFD_INFO_EXIT; since Linux 6.15, also once the parent has collected the exit status
_COUNT = "processes"
_HINTS = {
    "SIGKILL": " Often that is the out-of-memory killer of the kernel or of the job; `dmesg` or the job's log says so.",
    "SIGSEGV": " Run with `python -X faulthandler` to see the line.",
    "SIGABRT": " A library gave up; what it printed stands above.",
}


@dataclass(frozen=True)
class Peer:
    """A rank's process.

    Attributes:
        rank: global rank.
        pid: of the process, on its host.
        started: when it started, in the kernel's ticks, so that another process of the same number is not taken for
            it; 0 where that is not known.
        output: identifies what its standard error is written to, such as one terminal for several ranks.
        host: name of its host.
    """

    rank: int
    pid: int
    started: int
    output: str
    host: str


@functools.cache
def _host() -> str:
    """Identifies this kernel and the process numbers that are seen from here."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def _fields(pid: int) -> list[str]:
    """``/proc/PID/stat`` after the name, beginning with the state; empty if there is no such process, or no /proc."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def started_at(pid: int) -> int:
    """When a process of this machine was started, in clock ticks since boot; 0 where it is not there."""
    found = _fields(pid)
    return int(found[19]) if len(found) > 19 else 0


def this_process(rank: int) -> Peer:
    """The process that asks."""
    output = f"process {os.getpid()}"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        written = os.fstat(sys.stderr.fileno())
        output = f"{written.st_dev}:{written.st_ino}"
    return Peer(rank, os.getpid(), started_at(os.getpid()), output, socket.gethostname())


def told(status: int | None) -> str:
    """How a process ended, in words.

    Args:
        status: exit code, minus the number of the signal, or ``None`` where only its parent knows.
    """
    if status is None:
        return "ended without a word (a signal or an exit code, which only its parent knows)."
    if status >= 0:
        return f"ended with exit code {status} in the middle of the run."
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-status} ({name}).{_HINTS.get(name, '')}"


_KNOW_S = 0.05


class Process:
    """One process of this host, observed by another one.

    Args:
        peer: of another rank.
        exit_of: exit status of a process that this one started, ``None`` of others.
    """

    def __init__(self, peer: Peer, exit_of: Callable[[int], int | None]) -> None:
        self.peer = peer
        self._exit_of = exit_of
        self.handle: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # gone already, or a system without such handles
            self.handle = os.pidfd_open(peer.pid)

    @property
    def has_ended(self) -> bool:
        """Whether it is no more, or only waits for its parent to hear of its end."""
        if Path("/proc/self/stat").exists():
            found = _fields(self.peer.pid)
            return not found or found[0] in "ZX" or (self.peer.started > 0 and int(found[19]) != self.peer.started)
        try:
            os.kill(self.peer.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def status(self) -> int | None:
        """Exit code, or minus the signal, of a process that has ended; ``None`` where that cannot be known here."""
        known = self._exit_of(self.peer.pid)
        if known is not None:
            return known
        for find in (self._from_handle, self._from_proc):
            with contextlib.suppress(OSError):
                word = find()
                if word is not None:
                    return -(word & 0x7F) if word & 0x7F else word >> 8
        return None

    def _from_handle(self) -> int | None:
        if self.handle is None:
            return None
        answer = bytearray(struct.pack("=Q", _HAS_EXIT) + bytes(56))
        fcntl.ioctl(self.handle, _GET_INFO, answer)
        (mask,), (word,) = struct.unpack_from("=Q", answer), struct.unpack_from("=i", answer, 60)
        return int(word) if mask & _HAS_EXIT else None

    def _from_proc(self) -> int | None:
        found = _fields(self.peer.pid)
        return int(found[49]) if len(found) > 49 and found[0] == "Z" else None

    def close(self) -> None:
        """Look no more."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


class Peers:
    """The other ranks' processes on this host.

    Args:
        store: reachable from all ranks.
        rank: this rank.
        world_size: number of ranks.
        exit_of: exit status of a process that this one started, by its number; ``None`` of others.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, exit_of: Callable[[int], int | None] = lambda pid: None
    ) -> None:
        self._store = store
        self._world_size = world_size
        self._exit_of = exit_of
        self._mine = this_process(rank)
        self._known: dict[int, Process] = {}
        self._read = 0
        self._complete = False

    def publish(self) -> None:
        """Write this process into the store.

        Raises:
            RuntimeError: the store is gone.
        """
        folder = f"{_COUNT}/{_host()}"
        number = self._store.add(folder, 1)
        self._store.set(f"{folder}/{number}", json.dumps(asdict(self._mine)))
        self._store.add(_COUNT, 1)

    def learn(self) -> None:
        """Read which processes there are, until all ranks have written theirs.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._complete:
            return
        folder = f"{_COUNT}/{_host()}"
        complete = self._store.add(_COUNT, 0) >= self._world_size
        count = self._store.add(folder, 0)
        while self._read < count and self._store.check([f"{folder}/{self._read + 1}"]):
            self._read += 1
            peer = Peer(**json.loads(self._store.get(f"{folder}/{self._read}")))
            if peer.rank != self._mine.rank:
                self._known[peer.rank] = Process(peer, self._exit_of)
        self._complete = complete and self._read == count

    def wait(self, seconds: float) -> None:
        """Sleep, but not beyond the end of another rank's process; nor long while not all are known, as nobody can tell
        how one ended that was not.
        """
        seconds = seconds if self._complete else min(seconds, _KNOW_S)
        poll = select.poll()
        for process in list(self._known.values()):
            if process.handle is not None:
                poll.register(process.handle, select.POLLIN)
        poll.poll(seconds * 1000)

    def ended(self, only: int | None = None) -> dict[int, Process]:
        """Processes that have ended, by rank: of all ranks of this host, or of one."""
        looked_at = [(rank, process) for rank, process in list(self._known.items()) if only in (None, rank)]
        return {rank: process for rank, process in looked_at if process.has_ended}

    def knows(self, rank: int) -> bool:
        """Whether the process of ``rank`` is on this host."""
        return rank in self._known

    def close(self) -> None:
        """Stop observing processes; :meth:`ended` still reports those that have ended."""
        for process in list(self._known.values()):
            process.close()

    def forget(self, rank: int) -> None:
        """Look after this rank's process no more."""
        process = self._known.pop(rank, None)
        if process is not None:
            process.close()

    def same_output(self) -> set[int]:
        """Living ranks of this host that write to where this one writes, itself included."""
        others = {
            rank
            for rank, process in list(self._known.items())
            if process.peer.output == self._mine.output and not process.has_ended
        }
        return {self._mine.rank, *others}

    def describe(self, rank: int) -> str:
        """``4711 on host``; empty for a rank of another host."""
        process = self._known.get(rank)
        return f"{process.peer.pid} on {process.peer.host}" if process is not None else ""
