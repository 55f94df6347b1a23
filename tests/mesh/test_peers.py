"""Processes of other ranks: that they have ended, and how; and the clock of a store that does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_megatron.mesh.watch.dead_man import DeadManClock
from lightning_megatron.mesh.watch.peers import Peers, Process, started_at, this_process, told

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
WAIT = [sys.executable, "-S", "-c", "import sys; sys.stdin.readline(); sys.exit(3)"]


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(WAIT, stdin=subprocess.PIPE)


@pytest.mark.parametrize(
    ("act", "status", "words"),
    [
        (lambda child: child.kill(), -9, "was killed by signal 9 (SIGKILL). Often that is the out-of-memory killer"),
        (lambda child: child.send_signal(signal.SIGSEGV), -11, "(SIGSEGV). Run with `python -X faulthandler`"),
        (lambda child: child.stdin.close(), 3, "ended with exit code 3 in the middle of the run."),
    ],
)
def test_the_end_of_a_process_is_seen_with_its_signal_or_exit_code(act, status, words) -> None:  # type: ignore[no-untyped-def]
    store = dist.HashStore()
    mine, other = Peers(store, 0, 2), Peers(store, 1, 2)
    child = _start()
    other._mine = replace(this_process(1), pid=child.pid, started=started_at(child.pid))
    for peers in (mine, other):
        peers.publish()
    mine.learn()
    assert mine.knows(1) and not mine.ended() and mine.same_output() == {0, 1}
    asleep = threading.Thread(target=mine.wait, args=(1e6,), daemon=True)
    asleep.start()
    act(child)
    asleep.join(120.0)
    assert not asleep.is_alive(), "it sleeps no longer than the other process lives"
    (found,) = mine.ended().values()
    assert found.status() == status and words in told(status)
    assert str(child.pid) in mine.describe(1) and mine.same_output() == {0}
    assert child.stdin is not None
    child.stdin.close()
    child.wait()
    assert found.has_ended, "also once its parent has heard of it"
    mine.forget(1)
    assert not mine.ended()


def test_another_process_of_the_same_number_is_not_taken_for_it() -> None:
    peer = this_process(1)
    assert not Process(peer, lambda pid: None).has_ended
    assert Process(replace(peer, started=peer.started + 1), lambda pid: None).has_ended


def test_a_parent_knows_how_its_child_ended() -> None:
    assert Process(replace(this_process(1), pid=os.getpid()), lambda pid: -6).status() == -6
    assert "only its parent knows" in told(None)


def test_a_clock_rings_once_when_it_has_not_been_wound_up() -> None:
    rung: list[float] = []
    clock = DeadManClock(0.4, rung.append)
    clock.start()
    for _ in range(8):
        time.sleep(0.1)
        clock.wind()
    assert rung == []
    time.sleep(1.0)
    assert len(rung) == 1 and rung[0] >= 0.4


def test_a_stopped_clock_does_not_ring() -> None:
    rung: list[float] = []
    clock = DeadManClock(0.2, rung.append)
    clock.start()
    clock.stop()
    time.sleep(0.6)
    assert rung == []
