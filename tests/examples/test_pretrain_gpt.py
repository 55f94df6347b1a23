"""The main job, tiny: what a user sees on the screen and finds on the disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pretrain_gpt
import pytest

from tests.examples.script import Run, run_in_workers, run_script

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


OPTIONS = (*TINY, "--lr=1e-2", "--prompt=The pipeline", "--sample-length=20")


def assert_learnt(first: Run, folder: Path, layout: str) -> None:
    """What a user sees on the screen and finds on the disk after the first run."""
    assert first.code == 0, first.output
    assert layout in first.output
    assert first.output.count("Sample of the trained model:") == 1, "only rank 0 prints"
    assert re.search(r"^The pipeline.+", first.output, re.MULTILINE)
    assert re.search(r"loss=\d", first.output)
    assert "tokens/s=" in first.output
    assert first.number("Validation loss") < first.number("Unigram entropy")
    for name in ("report.html", "curves.png"):
        assert (folder / "runs" / "pretrain_gpt" / name).stat().st_size > 10_000
    assert "Total FLOPs" not in first.output
    for said in ("weights_only", "GLOBAL_RANK"):
        assert first.output.count(said) <= 1, said
    checkpoint = folder / re.search(r"^Checkpoint\s+(.+)$", first.output, re.MULTILINE).group(1)
    assert checkpoint.exists()


def assert_resumed(second: Run, first: Run, layout: str) -> None:
    assert second.code == 0, second.output
    assert layout in second.output and "blocks of an earlier run" in second.output
    assert second.number("Validation loss") < first.number("Validation loss")


@pytest.mark.launch
def test_the_main_job_learns_prints_a_sample_and_resumes_from_its_checkpoint_in_another_layout(
    texts: Path, tmp_path: Path
) -> None:
    options = ("--data", str(texts), *OPTIONS)
    first = run_script(SCRIPT, tmp_path, *options, "--data-parallel=1", "--steps=32")
    assert_learnt(first, tmp_path, "2 ranks = pipeline 2, cpu")
    second = run_in_workers(SCRIPT, tmp_path, *options, "--steps=44", "--resume=last", processes=4)
    assert_resumed(second, first, "4 ranks = pipeline 2 × data 2, cpu")


@pytest.mark.wide
@pytest.mark.launch
def test_the_main_job_starts_its_four_processes_and_resumes(texts: Path, tmp_path: Path) -> None:
    options, layout = ("--data", str(texts), *OPTIONS), "4 ranks = pipeline 2 × data 2, cpu"
    first = run_script(SCRIPT, tmp_path, *options, "--steps=32")
    assert_learnt(first, tmp_path, layout)
    assert_resumed(run_script(SCRIPT, tmp_path, *options, "--steps=44", "--resume=last"), first, layout)


@pytest.fixture
def end_of_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SystemExit]:
    """Runs the script's ``main`` here, where it has to end before it starts a process; how it ended."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    def end(*options: str) -> SystemExit:
        monkeypatch.setattr("sys.argv", [SCRIPT, *options])
        with pytest.raises(SystemExit) as ended:
            pretrain_gpt.main()
        return ended.value

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seeding sets them
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr("subprocess.Popen", refuse)
    return end


def test_help_explains_every_option(end_of_main: Callable[..., SystemExit], capsys: pytest.CaptureFixture[str]) -> None:
    assert not end_of_main("--help").code
    shown = capsys.readouterr().out
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
        assert re.search(rf"{option} .*\n?.*\w", shown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hidden=10", "--heads=4"), "`--hidden 10` is not a multiple of `--heads 4`"),
        (("--batch=3",), "`--batch 3` cannot be shared by 2 replicas; use a multiple of 2"),
        (("--data=./nowhere",), "`--data ./nowhere`: there is no such file or folder"),
    ],
)
def test_bad_options_are_refused_before_processes_start(
    end_of_main: Callable[..., SystemExit], options: tuple[str, ...], message: str
) -> None:
    assert message in str(end_of_main(*options).code)  # a text: Python prints it and ends with 1
