"""Runs an example as a user does: by its own launcher, or in reused processes with the environment of ``torchrun``.

A process of its own spends most of its time importing, so every day one example goes through the launcher.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import RankInfo
from tests.harness.pool import run_job

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE = 240.0  # seconds; four ranks on two cores import torch and Lightning in about 30


@dataclass(frozen=True)
class Run:
    """What came out of one command."""

    code: int
    output: str

    def number(self, name: str) -> float:
        """The number behind ``name`` in the closing lines."""
        found = re.search(rf"^{name}\s+([\d.]+)", self.output, re.MULTILINE)
        assert found, f"no {name!r} in:\n{self.output}"
        return float(found.group(1))


def run_script(name: str, folder: Path, *options: str) -> Run:
    """Run the example ``name`` in ``folder`` as a process group, which is killed as a whole at the deadline."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *options],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"no end after {DEADLINE:.0f} s:\n{output}")
    wait_for_end(process.pid)
    return Run(process.returncode, output.replace("\r", "\n"))


def run_in_workers(name: str, folder: Path, *options: str, processes: int) -> Run:
    """Run the example ``name`` in ``folder`` on ``processes`` workers, with the environment that ``torchrun`` gives."""
    outcomes = run_job(as_torchrun, processes, name, str(folder), options)
    output = "".join(outcome.output for outcome in outcomes)
    return Run(max(outcome.value for outcome in outcomes), output.replace("\r", "\n"))


def as_torchrun(info: RankInfo, name: str, folder: str, options: tuple[str, ...]) -> int:
    """The script as this process's main program; returns its exit code."""
    script = str(EXAMPLES / name)
    os.environ.update(torchrun_environment(info))
    os.chdir(folder)
    arguments, sys.argv = sys.argv, [script, *options]
    sys.path.insert(0, str(EXAMPLES))
    store = info.meet()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # the user's process, not the tests', decides what a warning is
            runpy.run_path(script, run_name="__main__")
    finally:
        del store
        sys.argv = arguments
        sys.path.remove(str(EXAMPLES))
    return 0


def torchrun_environment(info: RankInfo) -> dict[str, str]:
    """What ``torchrun`` tells a rank."""
    ranks = {"RANK": info.rank, "LOCAL_RANK": info.rank, "WORLD_SIZE": info.world_size, "GROUP_RANK": 0}
    sizes = {"LOCAL_WORLD_SIZE": info.world_size, "MASTER_PORT": info.port}
    texts = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "examples", "COLUMNS": "120"}
    return {key: str(value) for key, value in {**ranks, **sizes, **texts}.items()}


def wait_for_end(group: int, seconds: float = 15.0) -> None:
    """No rank may outlive the command for longer than a failing run may take to end."""
    deadline = time.monotonic() + seconds
    while left := living(group):
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)
            pytest.fail(f"processes {left} outlived the command by {seconds:.0f} s")
        time.sleep(0.1)


def living(group: int) -> list[int]:
    """Process numbers in a process group, those aside that have ended and wait to be collected."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, member_of, *_ = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(member_of) == group and state != "Z":
            found.append(int(entry.parent.name))
    return found
