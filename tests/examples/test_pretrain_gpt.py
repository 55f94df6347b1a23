"""The main job, tiny, through the real launcher: what a user sees on the screen and finds on the disk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
DEADLINE = 240.0  # seconds; four ranks on two cores import torch and Lightning in about 30
TINY = ("--layers=4", "--hidden=16", "--heads=2", "--sequence=16", "--vocabulary=300", "--batch=8", "--micro-batch=2")


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


def run_script(folder: Path, *options: str) -> Run:
    """Run the example in ``folder`` as a process group of its own, killed as a whole when it outlives the deadline."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *options],
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


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Forty documents of which each repeats one sentence: quickly learnt, and far from random."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        sentence = f"The pipeline of stage {number % 4} sends its activations on. "
        (folder / f"document{number:02}.txt").write_text(sentence * 12)
    return folder


@pytest.mark.launch
def test_the_main_job_learns_prints_a_sample_and_resumes_from_its_checkpoint(texts: Path, tmp_path: Path) -> None:
    options = ("--data", str(texts), *TINY, "--lr=1e-2", "--prompt=The pipeline", "--sample-length=20")
    first = run_script(tmp_path, *options, "--steps=40")
    assert first.code == 0, first.output
    assert "pipeline 2 x data 2 x tensor 1" in first.output
    assert first.output.count("Sample of the trained model:") == 1, "only rank 0 prints"
    assert re.search(r"^The pipeline.+", first.output, re.MULTILINE)
    assert re.search(r"loss=\d", first.output)
    assert "tokens/s=" in first.output
    assert first.number("Validation loss") < first.number("Unigram entropy")
    checkpoint = tmp_path / re.search(r"^Checkpoint\s+(.+)$", first.output, re.MULTILINE).group(1)
    assert checkpoint.exists()

    second = run_script(tmp_path, *options, "--steps=60", "--resume=last")
    assert second.code == 0, second.output
    assert "blocks of an earlier run" in second.output
    assert second.number("Validation loss") < first.number("Validation loss")


def test_help_explains_every_option(tmp_path: Path) -> None:
    shown = run_script(tmp_path, "--help")
    assert shown.code == 0
    for option in (
        "--data",
        "--pipeline",
        "--data-parallel",
        "--tensor",
        "--layers",
        "--hidden",
        "--steps",
        "--resume",
    ):
        assert re.search(rf"{option} .*\n?.*\w", shown.output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hidden=10", "--heads=4"), "`--hidden 10` is not a multiple of `--heads 4`"),
        (("--batch=3",), "`--batch 3` cannot be shared by 2 replicas; use a multiple of 2"),
        (("--data=./nowhere",), "`--data ./nowhere`: there is no such file or folder"),
    ],
)
def test_bad_options_are_refused_before_processes_start(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    refused = run_script(tmp_path, *options)
    assert refused.code != 0
    assert message in refused.output
