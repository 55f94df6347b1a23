"""What all commands do alike: the version, one style of error, and refusals before anything is imported or searched."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import lightning_megatron
from lightning_megatron.tools.commands.cli import app

MODEL = ["--layers", "24", "--hidden", "2048", "--heads", "16", "--seq", "1024"]
PLAN = ["plan", "--gpus", "8", "--global-batch", "8"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files that hold something else than their names promise."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noise").write_bytes(bytes(range(128, 256)))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    for name in ("a.ckpt", "b.ckpt"):
        (tmp_path / "saves" / name).mkdir(parents=True)
        (tmp_path / "saves" / name / "COMPLETE").touch()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}))
    (tmp_path / "train.py").write_text("x = 3\n")
    (tmp_path / "broken.py").write_text("def build(:\n")
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_the_version_is_printed_by_every_way_in(monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"lightning-megatron {lightning_megatron.__version__}"
    assert run("--version").output.strip() == said
    monkeypatch.setattr(sys, "argv", ["lightning_megatron", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lightning_megatron", run_name="__main__")
    assert ended.value.code == 0


def test_shells_can_complete_commands() -> None:
    asked = {"_LIGHTNING_MEGATRON_COMPLETE": "complete_bash", "COMP_WORDS": "lightning-megatron t", "COMP_CWORD": "1"}
    result = CliRunner().invoke(app, [], prog_name="lightning-megatron", env=asked)
    assert result.output.split() == ["timeline"]
    assert "--install-completion" in run("--help").output


REFUSED = [
    (["nonsense"], "No such command 'nonsense'"),
    (["timeline", "--bogus"], "No such option: --bogus"),
    (["timeline", "--stages", "many"], "--stages"),
    (["timeline", "--stages", "0"], "stages=0 must be at least 1"),
    (["timeline", "--svg", "folder"], "could not write `--svg folder`: this is a folder"),
    (["timeline", "--schedule", "broken:build"], "invalid syntax"),
    (PLAN, "give --hf-config FILE"),
    ([*PLAN, *MODEL, "--tensor", "0"], "`tensor=0` must be at least 1"),
    ([*PLAN, *MODEL, "--micro-batch", "-1"], "`micro_batch=-1` must be at least 1"),
    ([*PLAN, *MODEL, "--vocab", "0"], "`vocab=0` must be at least 1"),
    ([*PLAN, *MODEL, "--plot", "absent/plan.svg"], "there is no folder absent"),
    ([*PLAN, *MODEL, "--gpu", "H100", "--cluster", "broken.json"], "`--gpu` has no meaning beside it"),
    ([*PLAN, *MODEL, "--hf-config", "config.json"], "leave out --layers, --hidden, --heads"),
    ([*PLAN, "--hf-config", "absent.json"], "`absent.json`: no such file or directory"),
    ([*PLAN, *MODEL, "--cluster", "folder"], "`folder`: is a directory"),
    (["plan", "--gpus", "99999999999", "--global-batch", "8", *MODEL], "`gpus=99999999999` is over 1,000,000"),
    (["predict", "--runs", "absent.csv"], "`absent.csv`: no such file or directory"),
    (["predict", "--runs", "noise"], "--runs: this file is no text in UTF-8"),
    (["explain", "--hf-config", "broken.json"], "`broken.json` is not JSON"),
    (["explain", "--hf-config", "config.json", "--plan", "absent"], "`absent`: no such file or directory"),
    (["explain", "--hf-config", "config.json", "--tensor", "0"], "--tensor"),
    (["explain", "--hf-config", "config.json", "--plot", "plan.png"], "`--plot plan.png` must end in .svg"),
    (["explain", "--hf-config", "config.json", "--plot", "absent/plan.svg"], "there is no folder absent"),
    (["rehearse", "train"], "`train` must name a function, as in train.py:build"),
    (["rehearse", "absent.py:build"], "there is no file absent.py"),
    (["rehearse", "train.py:build", "--layout", "t0"], "`--layout` has 't0'"),
    (["rehearse", "train.py:build", "--strategy", "x"], "`--strategy x` must be name=value"),
    (["checkpoint", "inspect", "absent"], "there is no checkpoint at absent"),
    (["checkpoint", "inspect", "empty"], "there is no checkpoint in empty: the folder is empty"),
    (["checkpoint", "verify", "saves"], "saves is a folder of checkpoints; name one: saves/a.ckpt, saves/b.ckpt"),
    (["checkpoint", "verify", "absent"], "there is no checkpoint at absent"),
    (["checkpoint", "export", "folder", "out", "--format", "zip"], "`--format zip` must be"),
    (["checkpoint", "export", "folder", "out.ckpt", "--prefix", "m."], "`--prefix` is for folders"),
    (["checkpoint", "export", "folder", "out", "--shard-gb", "0"], "`--shard-gb 0.0` must be above 0"),
    (["checkpoint", "export", "folder", "out", "--config", "broken.json"], "`broken.json` is not JSON"),
    (["checkpoint", "import", "absent", "out"], "there is no checkpoint at absent"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_mistakes_are_told_in_one_line(files: Path, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    first, *more = result.stderr.splitlines()
    assert first.startswith("Error: ") and message in first, result.output
    assert result.exit_code == 2 and len(more) <= 1 and not result.stdout
    assert "Possible options: --help" not in first
    assert all(line.endswith("--help` lists what it takes.") for line in more)


def test_a_checkpoint_that_is_not_there_is_refused_without_slow_imports() -> None:
    program = (
        "import sys\nfrom lightning_megatron.tools.commands.cli import app\n"
        "try:\n    app(['checkpoint', 'inspect', 'absent'])\nexcept SystemExit as ended:\n    code = ended.code\n"
        "print(code, *({'torch', 'lightning', 'numpy', 'lightning_megatron.planner'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert done.stdout.split() == ["2"]


@pytest.mark.parametrize("arguments", [[], ["checkpoint"]], ids=["alone", "group"])
def test_a_command_without_a_name_shows_its_help_once(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and result.output.count("Usage:") == 1


def test_a_small_model_has_its_size_in_the_plan() -> None:
    small = ["--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "100"]
    result = run("plan", "--gpus", "2", "--global-batch", "8", *small)
    assert result.exit_code == 0
    assert "106.5K parameters" in result.output and "0.0B" not in result.output


def test_a_wide_pipeline_is_summed_up() -> None:
    result = run("timeline", "--stages", "40", "--micro-batches", "200")
    assert result.exit_code == 0
    assert "40, 39, 38, 37, 36, 35, 34, 33, ..., 8, 7, 6, 5, 4, 3, 2, 1 chunks" in result.output
    assert "use --svg or --trace" in result.output
