"""Through the real launchers: training works, and no way of ending leaves a process behind.

Each launch costs as much as dozens of tests in reused processes. Every day sees one of each way of ending: by itself in
tests/examples, and here a failure, a kill and Ctrl-C.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.launched import environment

SCRIPT = Path(__file__).with_name("launch_script.py")
LIKE_SRUN = Path(__file__).with_name("like_srun.py")
START_SECONDS, END_SECONDS = 240.0, 120.0  # deadlines for a machine that does other work too
LAUNCHERS = {
    "lightning": [sys.executable, str(SCRIPT)],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(SCRIPT)],
    "slurm": [sys.executable, str(LIKE_SRUN), "2", str(SCRIPT)],
    "slurm.sh": ["bash", str(Path(__file__).parents[2] / "examples" / "launch" / "slurm.sh")],
}
LIBC, PARENT_DEATH_SIGNAL = ctypes.CDLL(None), 1
WIDE = pytest.mark.wide
pytestmark = [pytest.mark.launch, pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")]


class Launched:
    """A training script in a session of its own, whose processes all carry a mark in their environment."""

    def __init__(self, launcher: str, mode: str, log: Path) -> None:
        self.mark = f"LAUNCH_TEST_{uuid.uuid4().hex}"
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*LAUNCHERS[launcher], mode],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(**{self.mark: "1"}, PATH=f"{log.parent / 'bin'}:{os.environ['PATH']}"),
                cwd=log.parent,
                start_new_session=True,
                preexec_fn=_begin,
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def pids(self) -> list[int]:
        """Living processes of this launch, wherever they were re-parented to."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def wait_for_start(self) -> dict[int, int]:
        """Process ids by rank, once both ranks have taken a step."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            started = dict(re.findall(r"STARTED rank=(\d) pid=(\d+)", self.said()))
            if len(started) == 2:
                return {int(rank): int(pid) for rank, pid in started.items()}
            time.sleep(0.1)
        raise AssertionError(f"the ranks did not start\n{self.said()}")

    def assert_all_end(self, seconds: float = END_SECONDS) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and (self.process.poll() is None or self.pids()):
            time.sleep(0.1)
        left = self.pids()
        assert not left and self.process.poll() is not None, f"still alive: {left}\n{self.said()}"


def _begin() -> None:
    """Dies with the tests, also where they are killed; Ctrl-C is heard, whatever shell runs them in the background."""
    LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _write_srun(folder: Path) -> None:
    """An ``srun`` of two tasks for the example's script, and the ``train.py`` that it names."""
    (folder / "bin").mkdir()
    srun = folder / "bin" / "srun"
    srun.write_text(f'#!/bin/sh\nshift 2  # --kill-on-bad-exit=1 python\nexec {sys.executable} {LIKE_SRUN} 2 "$@"\n')
    srun.chmod(0o755)
    (folder / "train.py").write_text(f"import runpy\n\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[type[Launched]]:
    launched: list[Launched] = []
    _write_srun(tmp_path)

    def start(launcher: str, mode: str) -> Launched:
        launched.append(Launched(launcher, mode, tmp_path / "output.txt"))
        return launched[-1]

    yield start  # type: ignore[misc]
    for each in launched:
        for pid in [each.process.pid, *each.pids()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each.process.wait(timeout=10)


@WIDE
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launched_script_trains_and_every_rank_ends_with_the_same_loss(launch: type, launcher: str) -> None:
    run = launch(launcher, "ordinary")
    run.wait_for_start()
    run.assert_all_end()
    done = dict(re.findall(r"DONE rank=(\d) loss=([\d.]+)", run.said()))
    assert run.process.returncode == 0, run.said()
    assert set(done) == {"0", "1"} and done["0"] == done["1"], run.said()


@pytest.mark.wide
def test_a_failing_rank_ends_the_launch_and_is_named(launch: type) -> None:
    run = launch("lightning", "fail")
    run.wait_for_start()
    run.assert_all_end()
    said = run.said()
    assert run.process.returncode != 0
    assert "rank 1 (pipeline 0" in said and "deliberate failure in a launched rank" in said, said


def test_ctrl_c_in_a_terminal_saves_says_so_in_one_line_and_ends_every_process(launch: type) -> None:
    run = launch("lightning", "save")
    run.wait_for_start()
    before = run.said()
    os.killpg(run.process.pid, signal.SIGINT)
    run.assert_all_end()
    said = run.said()[len(before) :].strip().splitlines()
    assert len([line for line in said if line.strip()]) == 1, run.said()
    told = re.match(r"Stopped by Ctrl-C after step \d+: saved (.*preempted.ckpt); resume with `ckpt_path=", said[0])
    assert told and Path(told[1]).exists(), said
    assert run.process.returncode == 130


@WIDE
def test_ctrl_c_for_the_first_process_alone_ends_all(launch: type) -> None:
    run = launch("lightning", "wait")
    run.wait_for_start()
    os.kill(run.process.pid, signal.SIGINT)
    run.assert_all_end()
    assert "Stopped by Ctrl-C" in run.said() and "nothing was saved" in run.said()


@WIDE
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_sigterm_saves_says_so_and_does_not_look_like_the_end_of_the_run(launch: type, launcher: str) -> None:
    run = launch(launcher, "save")
    run.wait_for_start()
    os.kill(run.process.pid, signal.SIGTERM)
    run.assert_all_end()
    told = re.findall(r"Stopped by SIGTERM after step \d+: saved (.*preempted.ckpt); resume with", run.said())
    assert len(told) == 1 and Path(told[0]).exists(), run.said()
    assert run.process.returncode == 143 if launcher == "lightning" else run.process.returncode != 0


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [("lightning", 1), pytest.param("lightning", 0, marks=WIDE), pytest.param("slurm", 1, marks=WIDE)],
)
def test_a_killed_rank_is_named_once_and_ends_the_others(launch: type, launcher: str, rank: int) -> None:
    run = launch(launcher, "wait")
    pids = run.wait_for_start()
    before = run.said()
    os.kill(pids[rank], signal.SIGKILL)
    run.assert_all_end()
    said = run.said()[len(before) :]
    assert said.count(f"rank {rank} (pipeline {1 - rank}, data 0, tensor 0) died") == 1, said
    assert said.count("SIGKILL") == 1 and len(said.splitlines()) < 20, said
    assert f"rank {1 - rank} (" not in said.replace(f"rank {1 - rank} (pipeline {rank}, data 0, tensor 0) ends", ""), (
        said
    )
    assert run.process.returncode != 0


@WIDE
def test_a_process_that_ends_before_the_ranks_have_met_ends_the_launch(launch: type) -> None:
    run = launch("lightning", "early")
    run.assert_all_end()
    assert run.process.returncode != 0
    assert "the process of local rank 1 ended with exit code 7 before the ranks had met" in run.said(), run.said()


@WIDE
def test_a_port_that_is_taken_is_said_and_ends_the_launch(launch: type, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        run = launch("lightning", "ordinary")
        run.assert_all_end()
    assert run.process.returncode != 0
    assert "another process has that port (MASTER_PORT)" in run.said(), run.said()
