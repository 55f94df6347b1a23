"""The commands that pages show run as they are written, on a tiny model with the names that the pages give to files.

Those of fine-tuning have a test of their own, as one goes on from what another has written.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from lightning_megatron.tools.commands.cli import app
from tests.generation.folders import commanded, make_folder, train
from tests.harness import run_trainers
from tests.unit.test_blocks import ROOT, commands

RANKS = ("--pipeline", "--tensor", "--data")
ELSEWHERE = ("--format adapter", "--merge-adapters")
"""Commands on checkpoints with adapters, which test_finetuning_page.py runs."""


def shown(page: str, *begin: str) -> list[str]:
    """A page's commands of these kinds, but those that are named without what they need."""
    found = [line for line in commands(ROOT / page) if line.startswith(begin) and not line.endswith(("...", "…"))]
    return [line for line in dict.fromkeys(found) if line not in begin and not any(each in line for each in ELSEWHERE)]


def run(line: str) -> str:
    """What a command prints that runs in one process."""
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exit_code == 0, f"{line}: {done.output}"
    return done.output


@pytest.mark.parametrize("line", shown("docs/schedules.md", "lightning-megatron timeline"), ids=str)
def test_a_timeline_is_the_one_that_the_page_shows(line: str) -> None:
    page = (ROOT / "docs/schedules.md").read_text(encoding="utf-8")
    picture = re.search(rf"^\$ {re.escape(line)}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert picture is not None, line
    assert run(line).strip() == picture[1].strip()


def test_a_plan_of_splits_is_read_from_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8).to_json_file("config.json")
    (line,) = shown("docs/tensor_parallel.md", "lightning-megatron explain")
    assert "q_proj" in run(line)


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which there is a model of Hugging Face, and the checkpoint of a run that trained it."""
    monkeypatch.chdir(tmp_path)
    for name in ("llama", "FOLDER"):
        make_folder(tmp_path / name, dtype=torch.float32)
    run_trainers(train, str(tmp_path / "llama"), str(tmp_path / "step=500.ckpt"), devices=2)
    return tmp_path


@pytest.mark.wide
def test_commands_on_checkpoints_run_one_after_the_other(trained: Path) -> None:
    lines = shown("docs/checkpoints.md", "lightning-megatron checkpoint")
    assert len(lines) > 5
    printed = [run(line) for line in lines]
    assert "pipeline" in printed[0] and (trained / "folder" / "config.json").is_file()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(trained / "folder")
    assert loaded.config.model_type == "llama"


@pytest.mark.wide
def test_prompts_are_continued_from_a_folder_and_from_a_checkpoint(trained: Path) -> None:
    (trained / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ABC", "Once")))
    lines = shown("docs/generation.md", "lightning-megatron generate")
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line)[1:]
        ranks = [int(words[words.index(name) + 1]) for name in RANKS if name in words]
        here = [str(trained / word) if (trained / word).exists() or word == "out.jsonl" else word for word in words]
        outcomes = run_trainers(commanded, here, devices=math.prod(ranks))
        assert all(outcome.value == 0 for outcome in outcomes), line
        (trained / "out.jsonl").unlink(missing_ok=True)
