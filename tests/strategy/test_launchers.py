"""Through the real launchers: training works, and no way of ending leaves a process behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("launch_script.py")
START_SECONDS, END_SECONDS = 150.0, 15.0
LAUNCHERS = {
    "lightning": [sys.executable, str(SCRIPT)],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(SCRIPT)],
    "slurm": [sys.executable, str(Path(__file__).with_name("like_srun.py")), "2", str(SCRIPT)],
}
pytestmark = [pytest.mark.launch, pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")]


class Launched:
    """A training script in a session of its own, whose processes all carry a mark in their environment."""

    def __init__(self, launcher: str, mode: str, log: Path) -> None:
        self.mark = f"LAUNCH_TEST_{uuid.uuid4().hex}"
        self.log = log
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, self.mark: "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*LAUNCHERS[launcher], mode],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=log.parent,
                start_new_session=True,
                preexec_fn=_listen_to_ctrl_c,
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


def _listen_to_ctrl_c() -> None:
    """Undo what a shell does to commands that it runs in the background, if the tests are one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[type[Launched]]:
    launched: list[Launched] = []

    def start(launcher: str, mode: str) -> Launched:
        launched.append(Launched(launcher, mode, tmp_path / "output.txt"))
        return launched[-1]

    yield start  # type: ignore[misc]
    for each in launched:
        for pid in [each.process.pid, *each.pids()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each.process.wait(timeout=10)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launched_script_trains_and_every_rank_ends_with_the_same_loss(launch: type, launcher: str) -> None:
    run = launch(launcher, "ordinary")
    run.wait_for_start()
    run.assert_all_end(60)
    done = dict(re.findall(r"DONE rank=(\d) loss=([\d.]+)", run.said()))
    assert run.process.returncode == 0, run.said()
    assert set(done) == {"0", "1"} and done["0"] == done["1"], run.said()


def test_a_failing_rank_ends_the_launch_and_is_named(launch: type) -> None:
    run = launch("lightning", "fail")
    run.wait_for_start()
    run.assert_all_end()
    said = run.said()
    assert run.process.returncode != 0
    assert "rank 1 (pipeline 0" in said and "deliberate failure in a launched rank" in said, said


@pytest.mark.parametrize("whom", ["terminal", "launcher"])
def test_ctrl_c_ends_every_process(launch: type, whom: str) -> None:
    run = launch("lightning", "wait")
    run.wait_for_start()
    if whom == "terminal":
        os.killpg(run.process.pid, signal.SIGINT)
    else:
        os.kill(run.process.pid, signal.SIGINT)
    run.assert_all_end()


def test_a_killed_rank_ends_the_others(launch: type) -> None:
    run = launch("lightning", "wait")
    os.kill(run.wait_for_start()[1], signal.SIGKILL)
    run.assert_all_end()
