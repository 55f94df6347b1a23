"""The fine-tuning example: it learns, and Hugging Face loads what it saved."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.examples.script import Run, run_in_workers, run_script


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A hundred short documents of different lengths."""
    file = tmp_path / "notes.txt"
    file.write_text("\n\n".join(f"Stage {i % 5} waits for stage {i % 5 + 1}." * (1 + i % 3) for i in range(100)))
    return file


@pytest.mark.parametrize(
    "run_example",
    [
        pytest.param(partial(run_in_workers, processes=4), id="torchrun"),
        pytest.param(run_script, id="launcher", marks=[pytest.mark.wide, pytest.mark.launch]),
    ],
)
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.wide), True])
def test_a_hugging_face_model_trains_on_two_stages_of_two_tensor_ranks_and_is_saved_whole(
    notes: Path, tmp_path: Path, run_example: Callable[..., Run], packed: bool
) -> None:
    options = ("--data", str(notes), "--steps=20", "--batch=8", "--micro-batch=3", "--sequence=24", "--lr=5e-3")
    options += ("--pack",) if packed else ()
    run = run_example("finetune_hf.py", tmp_path, *options)
    assert run.code == 0, run.output
    before, after = map(float, re.search(r"([\d.]+) nats per token before, ([\d.]+) after", run.output).groups())
    assert after < 0.8 * before

    folder = tmp_path / "runs" / "finetune_hf" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor([tokenizer("Stage 3 waits for stage 4.")["input_ids"]])
    assert float(model(input_ids=tokens, labels=tokens).loss.detach()) < 0.8 * before
