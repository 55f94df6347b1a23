"""The life of a worker process: take a job, run it, report, wait until all ranks are done, clean up, take the next.

Two phases end a job. A rank first reports its result and keeps its process group open, since others may still be
talking to it; only when the test process has heard from every rank does it say "finish".
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from tests.harness.job import Job, Outcome, pack, unpack

FINISH = b"finish"


def main(jobs: Connection, lifeline: Connection, log_path: str) -> None:
    """Serves jobs until the pipe closes.

    Args:
        jobs: receives packed jobs and ``FINISH``; sends a packed `Outcome` after a job and ``FINISH`` when cleaned up.
        lifeline: never carries anything; it closes when the test process ends, however it ends.
        log_path: this worker's file for printed output; stacks go to ``log_path + ".stacks"``.
    """
    multiprocessing.set_start_method("fork", force=True)  # of loader workers: as for users, not as for this process
    os.setsid()  # a Ctrl-C in the terminal is pytest's to handle, and killing the group takes data loader workers along
    _redirect_output(log_path)
    stacks = open(log_path + ".stacks", "w")  # noqa: SIM115 - stays open for the signal handler
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()

    from tests.harness.state import Pristine

    pristine = Pristine.capture()
    while True:
        try:
            data = jobs.recv_bytes()
        except EOFError:
            return
        faulthandler.unregister(signal.SIGUSR1)  # a Trainer before may have reset it, which register would not notice
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.disable()
        faulthandler.enable(file=stacks)
        outcome = _run(data)
        jobs.send_bytes(_packed(outcome))
        if jobs.recv_bytes() != FINISH:
            return
        pristine.restore()
        sys.stdout.flush()
        sys.stderr.flush()
        jobs.send_bytes(FINISH)


def _run(data: bytes) -> Outcome:
    from tests.harness.state import prepare

    rank = -1
    try:
        job: Job = unpack(data)
        rank = job.info.rank
        sys.path += [path for path in job.sys_path if path not in sys.path]
        function = job.resolve()
        prepare(rank, job.info.directory)
        return Outcome(rank, value=function(job.info, *job.args, **job.kwargs))
    except BaseException as error:  # whatever it is, the test process wants to hear of it
        return _failed(rank, error)


def _failed(rank: int, error: BaseException) -> Outcome:
    types = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__)
    trace = "".join(traceback.format_exception(error))
    return Outcome(rank, error=f"{type(error).__name__}: {error}", error_types=types, trace=trace)


def _packed(outcome: Outcome) -> bytes:
    try:
        return pack(outcome)
    except Exception as error:  # the test returned something that cannot travel; say so instead of dying
        return pack(_failed(outcome.rank, error))


def _redirect_output(path: str) -> None:
    target = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - the process's own stdout
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _die_with_parent(lifeline: Any) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os.killpg(os.getpgrp(), signal.SIGKILL)
