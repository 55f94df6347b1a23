"""Ranks tell each other of failures through the key-value store that they met at.

::

    rank 5  tell ─────────────▶ store ◀── look ─ rank 2
                                  ▲
                                  └────── gather: whether everybody is still there

Whoever asks it may find that it does not answer, because its host is gone or the network is cut. The first such answer
is the last: a rank that has lost the store asks it no more, and takes its host for the one that has failed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from lightning_megatron.mesh.layout import Layout
from lightning_megatron.mesh.watch.peers import Peers, told

_FAILURE = "failure"
ACKNOWLEDGED = "acknowledged"
"""Below it, ranks say that they have read of the failure."""
_GATHER = "gather"
_LOCK_S = 10.0
_ENDING_S = 3.0  # until a process that has closed its connections is gone, on a busy machine
RAISED, DIED, HUNG, REFUSED = "raised", "died", "hung", "refused"


@dataclass(frozen=True)
class Failure:
    """The first failure of a run.

    Attributes:
        rank: who.
        where: its coordinates, in words.
        traceback: as text, or what else is known.
        kind: ``raised`` an exception, ``died`` without a word, ``hung``, or ``refused`` for what several ranks do
            together.
    """

    rank: int
    where: str
    traceback: str
    kind: str = RAISED

    def __str__(self) -> str:
        if self.kind == REFUSED:
            return self.traceback
        return f"{self.where} {self.traceback}" if self.kind == DIED else f"{self.where} failed:\n{self.traceback}"


class AgreedFailure(RuntimeError):
    """A failure on which all ranks have agreed. Every rank raises it, so none reports it to the others."""


class StoreIsSilent(RuntimeError):
    """The store does not answer, or its host is gone."""


class Board:
    """This rank's entries in the store, and what it reads of the others'.

    Args:
        store: of the run; other threads of this process may ask it as well.
        layout: names ranks by their coordinates.
        rank: this rank.
        peers: processes of other ranks, of which one hosts the store.

    Attributes:
        store: asked inside of :meth:`asking` only.
        is_silent: whether it is asked no more.
    """

    def __init__(self, store: Any, layout: Layout, rank: int, peers: Peers) -> None:
        self.store, self.is_silent = store, False
        self._layout, self._rank, self._peers = layout, rank, peers
        self._lock = threading.Lock()
        self._seen: Failure | None = None

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around questions to the store; a RuntimeError if it has not answered others before."""
        self.is_silent = self.is_silent or self._host_has_ended()
        if self.is_silent or not self._lock.acquire(timeout=_LOCK_S):
            raise StoreIsSilent("the store does not answer")
        try:
            yield
        except dist.DistError as error:
            self.lose()
            raise StoreIsSilent(str(error)) from error
        finally:
            self._lock.release()

    def tell(self, rank: int, text: str, kind: str) -> None:
        """Write the failure of ``rank`` into the store, unless there is one already; inside :meth:`asking`."""
        failure = Failure(rank, self._layout.describe(rank), text, kind)
        self.store.compare_set(_FAILURE, "", json.dumps(asdict(failure)))

    def has_failure(self) -> bool:
        """Whether a failure was told; inside :meth:`asking`."""
        return bool(self.store.check([_FAILURE]))

    def look(self) -> Failure | None:
        """The first failure of the run, if there was one; says that this rank has read of it."""
        if self._seen is not None:
            return self._seen
        try:
            with self.asking():
                if not self.has_failure():
                    return None
                self._seen = Failure(**json.loads(self.store.get(_FAILURE)))
                self.store.set(f"{ACKNOWLEDGED}/{self._rank}", "1")
        except RuntimeError:
            return self._seen
        return self._seen

    def gather(self, seconds: float) -> bool:
        """Whether every rank calls this within ``seconds``: whether collectives are possible after a failure.

        The first that knows says so for all: one that has waited in vain, or one that has seen all others.
        """
        deadline = time.monotonic() + seconds
        try:
            with self.asking():
                arrived = self.store.add(_GATHER, 1)
            goal = (arrived + self._layout.world_size - 1) // self._layout.world_size * self._layout.world_size
            while arrived < goal and time.monotonic() < deadline:
                time.sleep(0.05)
                with self.asking():
                    arrived = self.store.add(_GATHER, 0)
            with self.asking():
                said = self.store.compare_set(f"{_GATHER}/{goal}", "", "met" if arrived >= goal else "apart")
        except RuntimeError:
            return False
        return bytes(said) == b"met"

    def _host_has_ended(self) -> bool:
        """Whether the process of the store is known to be gone: torch would print a page about each question to it."""
        process = self._peers.ended(0).get(0)
        if process is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return False
        text = f"died: its process ({self._peers.describe(0)}) {told(process.status())}"
        self._seen = self._seen or Failure(0, self._layout.describe(0), text, DIED)
        return True

    def lose(self) -> None:
        """Ask the store no more; its host closes connections before its end can be seen, which is waited for."""
        self.is_silent = True
        deadline = time.monotonic() + _ENDING_S
        while self._peers.knows(0) and not self._host_has_ended() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._seen = self._seen or Failure(0, self._layout.describe(0), self.lost(), DIED)

    def lost(self) -> str:
        """Message for a store whose host does not answer."""
        return "died: its process hosts the store that the ranks met at, and the connection to it is closed."
