"""Runs an example as a user does, and makes sure that nothing of it outlives the test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
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
    """Run the example ``name`` in ``folder`` as a process group of its own, killed as a whole when it outlives the deadline."""
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
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # no rank may outlive the command
    return Run(process.returncode, output.replace("\r", "\n"))
