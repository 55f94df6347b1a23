"""What messages about generation advise, followed to the letter: it works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightning_megatron.tools.commands.cli import app
from tests.checkpoints.adapter_scenarios import train_adapter
from tests.generation.folders import commanded, make_folder, make_tokenizer, refused, train_two
from tests.harness import run_trainers

WIDE = pytest.mark.wide
LONG = [[1] * 125]  # of 128 positions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("generation") / "model")


@pytest.mark.parametrize(
    ("prompts", "options", "words", "instead", "others"),
    [
        (LONG, {"max_new_tokens": 8}, "cut the prompt to 121 tokens", [[1] * 121], {"max_new_tokens": 8}),
        pytest.param(LONG, {"max_new_tokens": 200}, "positions; lower", LONG, {"max_new_tokens": 4}, marks=WIDE),
        pytest.param(LONG, {"max_new_tokens": 8}, "or lower `max_new_tokens`", LONG, {"max_new_tokens": 3}, marks=WIDE),
        pytest.param(["AB"], {}, "need a `tokenizer=`", [[2, 3]], {}, marks=WIDE),
        pytest.param(
            [[1]],
            {"cache_implementation": "quantized"},
            'use "dynamic" or "static"',
            [[1]],
            {"cache_implementation": "static"},
            marks=WIDE,
        ),
    ],
)
def test_a_list_that_was_refused_is_continued_as_told(
    prompts: Any, options: dict[str, Any], words: str, instead: Any, others: dict[str, Any], folder: Path
) -> None:
    assert all(words in outcome.value for outcome in run_trainers(refused, str(folder), prompts, options, devices=2))
    found = [outcome.value for outcome in run_trainers(refused, str(folder), instead, others, devices=2)]
    assert found == ["nothing", "nothing"]


@pytest.mark.parametrize("kind", ["adapter", pytest.param("two models", marks=WIDE)])
def test_a_checkpoint_that_the_command_does_not_take_is_written_as_a_folder_that_it_takes(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    make_tokenizer().save_pretrained(tmp_path / "words")
    if kind == "adapter":
        run_trainers(train_adapter, "llama", str(tmp_path / "run.ckpt"), {"pipeline_parallel_size": 1}, devices=1)
        written = ["--merge-adapters"]
    else:
        run_trainers(train_two, str(folder), str(tmp_path / "run.ckpt"), devices=1)
        written = ["--prefix", "second."]
    asked = ["generate", "--prompt", "AB", "--max-new-tokens", "2", "--json"]
    run = [*asked, "--checkpoint", str(tmp_path / "run.ckpt")]
    assert "name the folder of one with `--tokenizer`" in _said(*run)
    advice = _said(*run, "--tokenizer", str(tmp_path / "words"))
    assert "`lightning-megatron checkpoint export" in advice and "with `--hf`" in advice
    export = ["checkpoint", "export", str(tmp_path / "run.ckpt"), str(tmp_path / "out")]
    if kind == "two models":
        assert "name the start of the parameters' names with `--prefix`" in _said(*export)
    assert _said(*export, *written).startswith("wrote")
    hf = [*asked, "--hf", str(tmp_path / "out")]
    assert "name one with `--tokenizer`" in _said(*hf)
    (outcome,) = run_trainers(commanded, [*hf, "--tokenizer", str(tmp_path / "words")], devices=1)
    assert outcome.value == 0 and '"prompt": "AB"' in outcome.output


def test_an_output_that_is_there_is_replaced_as_told(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run = ["generate", "--hf", str(folder), "--prompt", "AB", "--max-new-tokens", "2", "--out", str(out)]
    assert run_trainers(commanded, run, devices=1)[0].value == 0
    assert "is there already, and complete; remove it, or name another file" in _said(*run)
    first = out.read_text()
    out.unlink()
    assert run_trainers(commanded, run, devices=1)[0].value == 0 and out.read_text() == first


def _said(*arguments: str) -> str:
    """What a command says, in one line."""
    return " ".join(CliRunner().invoke(app, arguments).output.split())
