"""Runs an example as a user does, and makes sure that nothing of it outlives the test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

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
