"""When one rank fails, every rank ends, and says which one it was.

A failed rank cannot join the collectives that the others wait in, so the news travels beside them, through the
key-value store that the processes met at. A thread on every rank looks there once in a while. Whoever waits for the
dead usually wakes by itself, because the connection closes; whoever does not is ended after a grace period.

::

    rank 5  raise ─ report ──────────────▶ store
    rank 2  blocked in a receive            │ poll ─ notice ─ grace ─ message, exit 1
    rank 0  RuntimeError: connection closed │ look ─ note "rank 5 (pipeline 1, data 0, tensor 1) failed"
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_megatron.mesh.layout import Layout
from lightning_megatron.mesh.watch import waits
from lightning_megatron.mesh.watch.hang import HangWatch

_FAILURE = "failure"
_ACKNOWLEDGED = "acknowledged"
_GATHER = "gather"


@dataclass(frozen=True)
class Failure:
    """The first failure of a run: who, and the traceback as text."""

    rank: int
    where: str
    traceback: str

    def __str__(self) -> str:
        return f"{self.where} failed:\n{self.traceback}"


class RemoteFailure(RuntimeError):
    """Raised on a rank that had to stop because another one failed; the message carries the other's traceback."""


class AgreedFailure(RuntimeError):
    """Raised by all ranks alike, which have agreed on it: nobody has to be told of another's."""


def is_echo(error: BaseException) -> bool:
    """Whether ``error`` may be the echo of another rank's failure: a connection that broke, or was silent for too long.

    Such an error was raised while this rank waited for others: in one of our own calls, which say that they wait, or in
    a call of ``torch.distributed`` that a user's code made. Everything else began on this rank.
    """
    if isinstance(error, RemoteFailure) or not isinstance(error, (RuntimeError, ConnectionError)):
        return False
    if isinstance(error, dist.DistError) or waits.interrupted(error) or _raised_by_torch(error):
        return True
    return error.__cause__ is not None and is_echo(error.__cause__)


def _raised_by_torch(error: BaseException) -> bool:
    """Whether it was raised inside of ``torch.distributed``."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and innermost.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed")


class FailureWatch:
    """Reports this rank's failure to the others, and theirs to this one.

    Args:
        store: a store reachable from all ranks; a connection of its own is opened.
        layout: names ranks by their coordinates.
        rank: this rank.
        run: number of the run on this store, so that runs do not see each other's failures.
        poll_s: seconds between looks.
        hang_s: seconds until a rank that others wait for is reported, or ``None`` for never.
        grace_s: seconds between noticing a remote failure and ending a process that does not end by itself.
    """

    def __init__(
        self,
        store: Any,
        layout: Layout,
        rank: int,
        run: int,
        poll_s: float = 0.5,
        grace_s: float = 5.0,
        hang_s: float | None = None,
    ) -> None:
        base = store.clone() if hasattr(store, "clone") else store
        self._store = dist.PrefixStore(f"lightning_megatron/{run}", base)
        self._layout = layout
        self._rank = rank
        self._poll_s = poll_s
        self._grace_s = grace_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._seen: Failure | None = None
        self.reported = False
        self._hang = HangWatch(self._store, rank, layout.world_size, hang_s) if hang_s is not None else None
        self._thread = threading.Thread(target=self._watch, name="lightning_megatron failure watch", daemon=True)

    def start(self) -> None:
        """Start looking for failures."""
        self._thread.start()

    def beat(self) -> None:
        """A batch begins."""
        if self._hang is not None:
            self._hang.beat()

    def stop(self) -> None:
        """Stop looking; a remote failure no longer ends this process."""
        self._stopped.set()

    def report(self, exception: BaseException) -> None:
        """Tell the other ranks; only the first report of a run is kept. Later calls do nothing."""
        self.stop()
        if self.reported:
            return
        self.reported = True
        text = "".join(traceback.format_exception(exception))
        record = json.dumps({"rank": self._rank, "where": self._layout.describe(self._rank), "traceback": text})
        try:
            with self._lock:
                self._store.compare_set(_FAILURE, "", record)
        except RuntimeError as error:
            print(f"{self._layout.describe(self._rank)} could not report its failure: {error}", file=sys.stderr)

    def linger(self, seconds: float = 4.0) -> None:
        """Keep this process (which may host the store) alive until the others have read the report."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                with self._lock:
                    acknowledged = self._store.add(_ACKNOWLEDGED, 0)
            except RuntimeError:
                return
            if acknowledged >= self._layout.world_size - 1:
                return
            time.sleep(0.1)

    def remote(self, wait_s: float = 0.0) -> Failure | None:
        """The first failure of the run if another rank had it; waits up to ``wait_s`` seconds for the news."""
        deadline = time.monotonic() + wait_s
        while True:
            failure = self._look()
            if failure is not None:
                return failure if failure.rank != self._rank else None
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def gather(self, seconds: float) -> bool:
        """Whether every rank calls this within ``seconds``; after a failure, decides if collectives are still
        possible.
        """
        deadline = time.monotonic() + seconds
        try:
            with self._lock:
                arrived = self._store.add(_GATHER, 1)
            goal = (arrived + self._layout.world_size - 1) // self._layout.world_size * self._layout.world_size
            while arrived < goal and time.monotonic() < deadline:
                time.sleep(0.05)
                with self._lock:
                    arrived = self._store.add(_GATHER, 0)
        except RuntimeError:
            return False
        return bool(arrived >= goal)

    def _look(self) -> Failure | None:
        if self._seen is not None:
            return self._seen
        try:
            with self._lock:
                if not self._store.check([_FAILURE]):
                    return None
                record = json.loads(self._store.get(_FAILURE))
                self._seen = Failure(**record)
                if self._seen.rank != self._rank:
                    self._store.add(_ACKNOWLEDGED, 1)
        except RuntimeError:
            return None
        return self._seen

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_s):
            try:
                with self._lock:
                    self._look_for_hangs()
                    failed = self._store.check([_FAILURE])
            except RuntimeError:
                self._end("the process that hosts the store is gone, and with it the run")
                return
            if failed:
                failure = self._look()
                self._end(str(failure) if failure is not None else "another rank failed")
                return

    def _look_for_hangs(self) -> None:
        found = self._hang.look() if self._hang is not None else None
        if found is not None and not self._stopped.is_set():
            rank, told = found
            record = json.dumps({"rank": rank, "where": self._layout.describe(rank), "traceback": told})
            self._store.compare_set(_FAILURE, "", record)

    def _end(self, reason: str) -> None:
        """Give the main thread a while to end by itself, then end the process."""
        if self._stopped.wait(self._grace_s):
            return
        print(f"\n{self._layout.describe(self._rank)} ends because {reason}", file=sys.stderr, flush=True)
        os._exit(1)
