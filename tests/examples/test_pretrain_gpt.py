"""The main job, tiny, through the real launcher: what a user sees on the screen and finds on the disk."""

from __future__ import annotations

import re
from pathlib import Path

import pretrain_gpt
import pytest

from tests.examples.script import run_script

SCRIPT = "pretrain_gpt.py"
TINY = ("--layers=4", "--hidden=16", "--heads=2", "--sequence=16", "--vocabulary=300", "--batch=8", "--micro-batch=2")


@pytest.mark.parametrize(
    ("gpus", "options", "layout"),
    [
        (0, (), ("cpu", 2, 2)),
        (0, ("--pipeline=3", "--data-parallel=1"), ("cpu", 3, 1)),
        (1, (), ("gpu", 1, 1)),
        (2, (), ("gpu", 2, 1)),
        (8, (), ("gpu", 2, 4)),
        (8, ("--tensor=2",), ("gpu", 2, 2)),
        (8, ("--pipeline=4",), ("gpu", 4, 2)),
        (8, ("--nodes=2",), ("gpu", 2, 8)),
        (8, ("--accelerator=cpu",), ("cpu", 2, 2)),
    ],
)
def test_the_layout_is_what_was_asked_for_or_fills_the_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int, options: tuple[str, ...], layout: tuple[str, int, int]
) -> None:
    monkeypatch.setattr("sys.argv", [SCRIPT, *options])
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert pretrain_gpt.choose_layout(pretrain_gpt.parse_arguments()) == layout


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
    first = run_script(SCRIPT, tmp_path, *options, "--steps=40")
    assert first.code == 0, first.output
    assert "pipeline 2 x data 2 x tensor 1" in first.output
    assert first.output.count("Sample of the trained model:") == 1, "only rank 0 prints"
    assert re.search(r"^The pipeline.+", first.output, re.MULTILINE)
    assert re.search(r"loss=\d", first.output)
    assert "tokens/s=" in first.output
    assert first.number("Validation loss") < first.number("Unigram entropy")
    checkpoint = tmp_path / re.search(r"^Checkpoint\s+(.+)$", first.output, re.MULTILINE).group(1)
    assert checkpoint.exists()

    second = run_script(SCRIPT, tmp_path, *options, "--steps=60", "--resume=last")
    assert second.code == 0, second.output
    assert "blocks of an earlier run" in second.output
    assert second.number("Validation loss") < first.number("Validation loss")


def test_help_explains_every_option(tmp_path: Path) -> None:
    shown = run_script(SCRIPT, tmp_path, "--help")
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
    refused = run_script(SCRIPT, tmp_path, *options)
    assert refused.code != 0
    assert message in refused.output
