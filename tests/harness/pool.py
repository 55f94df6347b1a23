"""Worker processes that outlive a test: grown on demand, reused, killed with their stacks when a job does not end."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.harness import lanes, worker
from tests.harness.device import on_gpu
from tests.harness.job import Job, JobFailed, Outcome, RankInfo, check_function, pack, unpack

MAX_WORKERS = 16
_PORTS = range(15_000, 32_000)
DEADLINE = 120.0  # seconds a job may take
GRACE = 12.0  # seconds the other ranks get to end by themselves once one has failed
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Worker:
    """One process and its pipe."""

    def __init__(self, context: Any, directory: Path, number: int) -> None:
        self.log = directory / f"worker{number}.log"
        self.log.touch()
        self.connection, theirs = context.Pipe()
        self.lifeline, their_lifeline = context.Pipe()
        self.process = context.Process(target=worker.main, args=(theirs, their_lifeline, str(self.log)), daemon=False)
        self.process.start()
        theirs.close()
        their_lifeline.close()
        self.printed = 0

    def output(self) -> str:
        """What was printed since the last call."""
        with self.log.open(errors="replace") as file:
            file.seek(self.printed)
            text = file.read()
            self.printed = file.tell()
        return text

    def kill(self) -> None:
        """Ends the process and whatever it started."""
        if self.process.pid is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self.process.kill()
        self.process.join(timeout=10)
        self.connection.close()
        self.lifeline.close()

    def request_stacks(self) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)

    def stacks(self) -> str:
        path = Path(f"{self.log}.stacks")
        return path.read_text(errors="replace") if path.exists() else ""


class Pool:
    """Up to `MAX_WORKERS` reusable processes."""

    def __init__(self) -> None:
        self.context = _context()
        self.directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.idle: list[Worker] = []
        self.started = 0
        self.jobs = 0

    def run(
        self,
        function: Callable[..., Any],
        ranks: int,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        deadline: float = DEADLINE,
        grace: float = GRACE,
        check: bool = True,
    ) -> list[Outcome]:
        """Runs ``function(info, *args, **kwargs)`` on ``ranks`` processes.

        Args:
            function: importable by name; its first argument is the `RankInfo`.
            ranks: number of processes, at most `MAX_WORKERS`.
            args: further arguments, picklable.
            kwargs: further keyword arguments, picklable.
            deadline: seconds after which every process is killed.
            grace: seconds the others get after the first failure before they are killed too.
            check: raise when a rank failed; False returns the outcomes for the caller to judge.

        Raises:
            JobFailed: when ``check`` and a rank raised, died or was killed.
        """
        check_function(function)
        if not 1 <= ranks <= MAX_WORKERS:
            raise ValueError(f"ranks={ranks} is outside 1..{MAX_WORKERS}")
        packed = self._pack(function, ranks, tuple(args), kwargs or {})
        team = self._team(ranks)
        outcomes = _collect(team, packed, deadline, grace)
        if all(outcome.ok for outcome in outcomes) and _finish(team) and not on_gpu():
            self.idle = team + self.idle
        else:
            for member in team:
                member.kill()
        for outcome, member in zip(outcomes, team, strict=True):
            outcome.output += member.output()
        if check and not all(outcome.ok for outcome in outcomes):
            raise JobFailed(f"{function.__module__}.{function.__qualname__}", outcomes)
        return outcomes

    def close(self) -> None:
        for member in self.idle:
            member.kill()
        self.idle = []
        shutil.rmtree(self.directory, ignore_errors=True)

    def _pack(
        self, function: Callable[..., Any], ranks: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[bytes]:
        self.jobs += 1
        directory = self.directory / f"job{self.jobs}"
        directory.mkdir(parents=True)
        port, path = free_port(), tuple(sys.path)
        infos = [RankInfo(rank, ranks, port, str(directory)) for rank in range(ranks)]
        return [pack(Job(function.__module__, function.__qualname__, info, args, kwargs, path)) for info in infos]

    def _team(self, ranks: int) -> list[Worker]:
        self.idle = [member for member in self.idle if member.process.is_alive()]
        while len(self.idle) < ranks:
            self.idle.append(Worker(self.context, self.directory, self.started))
            self.started += 1
        team, self.idle = self.idle[:ranks], self.idle[ranks:]
        for member in team:
            member.output()
        return team


def _collect(team: list[Worker], packed: list[bytes], deadline: float, grace: float) -> list[Outcome]:
    """Sends the jobs and waits for every rank, the deadline, or ``grace`` seconds after the first failure."""
    start = time.monotonic()
    for member, data in zip(team, packed, strict=True):
        member.connection.send_bytes(data)
    ranks: dict[Any, int] = {member.connection: rank for rank, member in enumerate(team)}
    outcomes: dict[int, Outcome] = {}
    end = start + deadline
    while len(outcomes) < len(team):
        pending = [connection for connection, rank in ranks.items() if rank not in outcomes]
        ready = wait(pending, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = ranks[connection]
            outcomes[rank] = _receive(connection, rank, team[rank])
            outcomes[rank].seconds = time.monotonic() - start
            if not outcomes[rank].ok:
                team[rank].kill()  # as a process that raised ends: whoever waits for it hears of it
                end = min(end, time.monotonic() + grace)
    late = [rank for rank in range(len(team)) if rank not in outcomes]
    if late:
        why = (
            "another rank had failed" if outcomes and time.monotonic() < start + deadline else f"deadline {deadline} s"
        )
        outcomes.update(_kill_late(team, late, why, time.monotonic() - start))
    return [outcomes[rank] for rank in range(len(team))]


def _receive(connection: Any, rank: int, member: Worker) -> Outcome:
    try:
        return unpack(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        member.process.join(timeout=5)
        return Outcome(rank, error=f"process ended with exit code {member.process.exitcode}", stacks=member.stacks())


def _kill_late(team: list[Worker], late: list[int], why: str, seconds: float) -> dict[int, Outcome]:
    """Kills the whole team, since ranks that are done may be kept alive by the others; keeps the late ones' stacks."""
    for rank in late:
        team[rank].request_stacks()
    _wait_for_stacks([team[rank] for rank in late])
    for member in team:
        member.kill()
    error = f"killed while running: {why}"
    return {rank: Outcome(rank, error=error, stacks=team[rank].stacks(), seconds=seconds) for rank in late}


def _wait_for_stacks(late: list[Worker], seconds: float = 5.0) -> None:
    """Waits until every process has written its stacks; a busy machine takes a while, a process in C code may never."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all("most recent call first" in member.stacks() for member in late):
        time.sleep(0.1)
    time.sleep(0.2)  # the rest of the file


def _finish(team: list[Worker]) -> bool:
    """Lets every rank clean up; False when one could not within ten seconds."""
    try:
        for member in team:
            member.connection.send_bytes(worker.FINISH)
        return all(member.connection.poll(10) and member.connection.recv_bytes() == worker.FINISH for member in team)
    except (EOFError, OSError):
        return False


@functools.cache
def _context() -> Any:
    """How workers are started: forked from a process that has imported what they need and has run none of it."""
    for name, value in _ENVIRONMENT.items():  # the fork server inherits them; libraries read them at import
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    return context


def share_fork_server() -> None:
    """Starts the process that workers are forked from, for this process and those that are forked from it later."""
    _context()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running()
    server.ensure_running = lambda: None  # it asks after a child of its own, which the server is to the parent alone


def free_port() -> int:
    """A port that nobody uses. It is none of those that the system gives to connections, which could take it again
    before the ranks have met there.
    """
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port of {_PORTS} is free")


@functools.cache
def shared_pool() -> Pool:
    """The pool of this test session, created at first use."""
    pool = Pool()
    atexit.register(pool.close)
    lanes.AT_END.append(pool.close)
    return pool


def run_job(function: Callable[..., Any], ranks: int, *args: Any, **options: Any) -> list[Outcome]:
    """`Pool.run` on the session's pool; ``options`` are its keyword arguments."""
    return shared_pool().run(function, ranks, args, **options)


__all__ = ["Pool", "free_port", "run_job", "shared_pool"]
