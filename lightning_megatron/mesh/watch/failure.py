"""When one rank fails, every rank ends, and says which one it was.

A failed rank cannot join the collectives that the others wait in, so the news travels beside them, through the
key-value store that the processes met at (:mod:`~lightning_megatron.mesh.watch.board`). A thread on every rank looks
there once in a while. Whoever waits for the dead usually wakes by itself, because the connection closes; whoever does
not is ended after a grace period.

::

    rank 5  raise ─ report ──────────────▶ store
    rank 2  blocked in a receive            │ poll ─ notice ─ grace ─ message, exit 1
    rank 0  RuntimeError: connection closed │ look ─ note "rank 5 (pipeline 1, data 0, tensor 1) failed"

A rank that is killed reports nothing. It is known by its process, which its neighbours look after
(:mod:`~lightning_megatron.mesh.watch.peers`), or, where its whole host is gone, by the roll call that a rank asks for
whose connection broke without a reason. A store that does not answer ends the process by a clock
(:mod:`~lightning_megatron.mesh.watch.dead_man`).

One cause, one message: of the ranks that write to one terminal, one speaks, and none if the failed rank has printed its
own traceback there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lightning_megatron.mesh.layout import Layout
from lightning_megatron.mesh.watch import waits
from lightning_megatron.mesh.watch.board import ACKNOWLEDGED, DIED, HUNG, RAISED, REFUSED, Board, Failure, StoreIsSilent
from lightning_megatron.mesh.watch.dead_man import ASKING_S, LIMIT_S, DeadManClock
from lightning_megatron.mesh.watch.echoes import RemoteFailure
from lightning_megatron.mesh.watch.hang import HangWatch
from lightning_megatron.mesh.watch.peers import Peers, Process, told
from lightning_megatron.mesh.watch.turns import Turns, ranks_waited_for

_ROLL = "roll"
_CLOSING_S = 0.05  # a process that ends closes its connections a moment before it is gone


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
        exit_of: exit status of a process that this one started, by its number; ``None`` of others.

    Attributes:
        turns: ends of loops, which all ranks reach together.
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
        exit_of: Callable[[int], int | None] = lambda pid: None,
    ) -> None:
        base = store.clone() if hasattr(store, "clone") else store
        self._store: Any = dist.PrefixStore(f"lightning_megatron/{run}", base)
        self._layout = layout
        self._rank = rank
        self._poll_s = poll_s
        self._grace_s = grace_s
        self._stopped = threading.Event()
        self._all_alive = False
        self._answered = 0
        self._doubtful: set[int] = set()
        self.reported = False
        self.turns = Turns(self._store, rank, layout.world_size, ranks_waited_for)
        self._peers = Peers(self._store, rank, layout.world_size, exit_of)
        self._board = Board(self._store, layout, rank, self._peers)
        self._clock = DeadManClock(LIMIT_S if hang_s is None else hang_s + ASKING_S, self._ring)
        self._hang = HangWatch(self._store, rank, layout.world_size, hang_s) if hang_s is not None else None
        self._thread = threading.Thread(target=self._watch, name="lightning_megatron failure watch", daemon=True)

    def start(self) -> None:
        """Start looking for failures."""
        self._peers.publish()
        self._clock.start()
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it was started: there are other ranks."""
        return self._thread.ident is not None

    def beat(self) -> None:
        """A batch begins."""
        if self._hang is not None:
            self._hang.beat()

    def stop(self) -> None:
        """Stop looking; a remote failure no longer ends this process."""
        self._stopped.set()
        self._clock.stop()

    def leave(self) -> None:
        """The run is over on this rank, whose process may end; the store's host waits for those who still ask it."""
        running, hosts = self.is_running and not self._stopped.is_set(), self._rank == 0
        if not hosts:
            self.stop()
        if running:
            with suppress(RuntimeError), self._board.asking():
                self._store.set(f"left/{self._rank}", "1")
            if hosts:
                self._linger("left")
        self.stop()

    def report(self, exception: BaseException) -> None:
        """Tell the other ranks; only the first report of a run is kept. Later calls do nothing."""
        self.stop()
        if self.reported:
            return
        self.reported = True
        text = "".join(traceback.format_exception(exception))
        try:
            with self._board.asking():
                self._board.tell(self._rank, text, RAISED)
                self._store.set(f"{ACKNOWLEDGED}/{self._rank}", "1")
        except RuntimeError:  # the store's host is gone; whoever looks after that process says so
            return

    def linger(self) -> None:
        """Keep this process (which may host the store) alive until the others have read the report."""
        self._linger(ACKNOWLEDGED)

    def _linger(self, key: str, seconds: float = 8.0) -> None:
        """Wait until every other rank has ended, or has said so under ``key``."""
        deadline = time.monotonic() + seconds
        missing = set(range(self._layout.world_size)) - {self._rank}
        with suppress(RuntimeError):
            while missing and time.monotonic() < deadline:
                missing -= self._peers.ended().keys()
                with self._board.asking():
                    missing = {rank for rank in missing if not self._store.check([f"{key}/{rank}"])}
                time.sleep(0.01)

    def remote(self, wait_s: float = 0.0) -> Failure | None:
        """The first failure of the run if another rank had it; waits up to ``wait_s`` seconds for the news."""
        deadline = time.monotonic() + wait_s
        while True:
            failure = self._board.look()
            if failure is not None:
                return failure if failure.rank != self._rank or failure.kind == REFUSED else None
            if time.monotonic() >= deadline or self._board.is_silent:
                return None
            time.sleep(0.05)

    def cause(self, wait_s: float) -> Failure | None:
        """As :meth:`remote`; if there is no news after that long, a roll call shows who does not answer."""
        time.sleep(_CLOSING_S)
        failure = self.remote(0.0 if self._all_alive else wait_s)
        if failure is not None or self._all_alive or not self.is_running:
            return failure
        try:
            with self._board.asking():
                question = self._store.add(_ROLL, 1)
            time.sleep(4 * self._poll_s)
            with self._board.asking():
                for rank in range(self._layout.world_size):
                    answers = [f"{_ROLL}/{question}/{rank}"], [f"left/{rank}"]
                    if rank != self._rank and not any(map(self._store.check, answers)):
                        self._board.tell(
                            rank, "died: its connections are closed, and its process does not answer.", DIED
                        )
                        break
                else:
                    self._all_alive = True
        except RuntimeError:
            return self.remote()
        return self.remote()

    def end_loop(self, kind: str, count: int | None = None) -> None:
        """Wait until this loop has ended on every rank.

        Args:
            kind: of loop, see :class:`~lightning_megatron.mesh.watch.turns.Turns`.
            count: batches that it had here; by default as many as it wanted.

        Raises:
            RemoteFailure: it ended after other numbers of batches, or a rank failed meanwhile.
        """
        try:
            with self._board.asking():
                key = self.turns.end(kind, count)
            with waits.on(waits.Waiting, f"end of {kind} on every rank"):
                while not self._has_ended(key):
                    time.sleep(0.02)
        except StoreIsSilent as error:
            failure = self.remote(wait_s=2.0)
            raise RemoteFailure(str(failure) if failure is not None else self._board.lost()) from error

    def _has_ended(self, key: str) -> bool:
        """Whether the loop behind ``key`` has ended on every rank; a RemoteFailure if it cannot."""
        with self._board.asking():
            found = self.turns.differ(key)
            if found is not None:
                self._board.tell(*found, REFUSED)
            ended = self.turns.all_ended(key)
        failure = self.remote()
        if failure is not None:
            raise RemoteFailure(str(failure))
        return ended

    def gather(self, seconds: float) -> bool:
        """Whether every rank calls this within ``seconds``: whether collectives are possible after a failure."""
        return self._board.gather(seconds)

    def message(self, failure: Failure) -> str:
        """The message printed when this process ends because of ``failure``; empty if another process prints it."""
        together = self._peers.same_output()
        if failure.kind == RAISED and failure.rank in together:
            return ""  # it prints its own traceback
        speaker = min(together - {failure.rank}, default=failure.rank)
        return f"\n{failure}\nAll ranks end with it." if speaker == self._rank else ""

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._peers.wait(self._poll_s)
            if self._stopped.is_set():
                break
            try:
                with self._board.asking():
                    failed = self._ask_everything()
            except RuntimeError:
                self._board.lose()
                failed = True
            self._clock.wind()
            if failed:
                self._end(self._board.look())
                break
        self._peers.close()

    def _ask_everything(self) -> bool:
        """One look at everything; whether a rank has failed."""
        self._peers.learn()
        asked = self._store.add(_ROLL, 0)
        while self._answered < asked:
            self._answered += 1
            self._store.set(f"{_ROLL}/{self._answered}/{self._rank}", "1")
        for rank, process in self._peers.ended().items():
            self._look_at_the_dead(rank, process)
        hung = self._hang.look() if self._hang is not None else None
        for kind, found in ((REFUSED, self.turns.look()), (HUNG, hung)):
            if found is not None and not self._stopped.is_set():
                self._board.tell(*found, kind)
        return self._board.has_failure()

    def _look_at_the_dead(self, rank: int, process: Process) -> None:
        """Report the end of another rank's process, if that was not the end of its run."""
        if self._store.check([f"left/{rank}"]) or self._board.has_failure():
            self._peers.forget(rank)
            return
        status = process.status()
        if status is None and rank not in self._doubtful:
            self._doubtful.add(rank)  # at the next look, unless a rank that knows more has told meanwhile
            return
        self._board.tell(rank, f"died: its process ({self._peers.describe(rank)}) {told(status)}", DIED)

    def _ring(self, seconds: float) -> None:
        """The store has not answered for too long: end, without asking anybody."""
        if self._stopped.is_set():
            return
        host = f"{os.environ.get('MASTER_ADDR', 'its host')}:{os.environ.get('MASTER_PORT', '?')}"
        print(
            f"\n{self._layout.describe(self._rank)} ends because the process that hosts the store ({host}, with rank "
            f"0) has not answered for {seconds:.0f} s (`hang_timeout`): the network between the two is cut, or that "
            'process is stopped. Once it is back, resume with `ckpt_path="last"`.',
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def _end(self, failure: Failure | None) -> None:
        """Give the main thread a while to end by itself, then end the process."""
        if self._stopped.wait(self._grace_s):
            return
        said = self.message(failure) if failure is not None else "another rank failed"
        if said:
            print(f"\n{self._layout.describe(self._rank)} ends because {said.strip()}", file=sys.stderr, flush=True)
        os._exit(1)
