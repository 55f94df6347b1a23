"""Exports and imports hold a tensor or two in memory, never the model; what they write is opened by plain libraries."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lightning_megatron.checkpoints.files.exporting import export_safetensors
from lightning_megatron.checkpoints.files.importing import import_checkpoint
from lightning_megatron.checkpoints.files.sources import open_source
from lightning_megatron.strategy.memory.live_bytes import LiveBytes
from tests.checkpoints.commands import command
from tests.checkpoints.scenarios import gpt2, resumed_from, started_from
from tests.generation.folders import make_tokenizer
from tests.harness import run_trainers

WIDE = pytest.mark.wide

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}


def _model(family: str) -> Any:
    torch.manual_seed(0)
    if family == "mixtral":
        config = transformers.MixtralConfig(vocab_size=64, num_hidden_layers=8, num_local_experts=4, **SIZES)
        return transformers.MixtralForCausalLM(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, num_hidden_layers=16, **SIZES))


def _peak(work: Callable[[], Any]) -> int:
    """Most bytes of tensors at once."""
    live = LiveBytes(torch.device("cpu"), lambda: (), lambda: ())
    live.begin(None)
    try:
        work()
    finally:
        found = live.end()
    return max(found.totals)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_model_is_converted_tensor_by_tensor(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = _model(family)
    model.save_pretrained(tmp_path / "model")
    sizes = [tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()]
    whole, largest = sum(sizes), max(sizes)
    limit = largest * (2 if family == "llama" else 4)  # experts of a layer are put together, and taken apart
    limit += largest // 16  # a small tensor in a cycle, until it is collected
    assert limit < whole / 3

    checkpoint, again = str(tmp_path / "a.ckpt"), tmp_path / "again"
    source = open_source(str(tmp_path / "model"))
    assert largest <= _peak(lambda: import_checkpoint(source, checkpoint, prefix="model.")) <= limit
    written = _peak(
        lambda: export_safetensors(open_source(checkpoint), again, dtype=dtype, shard_bytes=whole // 4),
    )
    assert largest <= written <= limit, (written, largest, whole)
    found = transformers.AutoModelForCausalLM.from_pretrained(again, dtype="auto").state_dict()
    assert all(torch.equal(found[name], value.to(dtype)) for name, value in model.state_dict().items())


@pytest.mark.parametrize("sizes", [(1, 1, 1), pytest.param((2, 1, 1), marks=WIDE), pytest.param((1, 1, 2), marks=WIDE)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=WIDE)])
def test_a_run_reads_its_first_weights_into_the_memory_that_they_have(
    sizes: tuple[int, int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    model = gpt2().to(dtype)
    model.save_pretrained(tmp_path)
    outcomes = run_trainers(started_from, str(tmp_path), sizes, devices=math.prod(sizes))
    for outcome in outcomes:
        value = outcome.value
        assert value["most"] <= value["own"] + value["largest"] < 1.6 * value["own"]
    for name, wanted in model.float().state_dict().items():
        assert torch.equal(outcomes[0].value["weights"][f"net.{name}"], wanted), name


@pytest.mark.parametrize("sizes", [(1, 1, 2), pytest.param((2, 1, 1), marks=WIDE), pytest.param((1, 2, 1), marks=WIDE)])
def test_a_run_that_goes_on_reads_its_weights_into_the_memory_that_they_have(sizes: tuple[int, int, int]) -> None:
    outcomes = run_trainers(resumed_from, sizes, devices=math.prod(sizes))
    for outcome in outcomes:
        assert outcome.value["most"] < 2 * outcome.value["own"], "states of random generators are read, too"
    for name, wanted in outcomes[0].value["saved"].items():
        assert torch.equal(outcomes[0].value["weights"][name], wanted), name


def test_an_exported_folder_has_all_that_plain_libraries_open(tmp_path: Path) -> None:
    _model("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    command("import", tmp_path / "model", tmp_path / "a.ckpt", "--prefix", "model.")
    more = ("--tokenizer", tmp_path / "model", "--dtype", "bfloat16", "--shard-gb", "0.0002")
    command("export", tmp_path / "a.ckpt", tmp_path / "again", *more)
    files = {file.name for file in (tmp_path / "again").iterdir()}
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"} <= files
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert model.dtype == torch.bfloat16
    prompt = words("ABC", return_tensors="pt", return_token_type_ids=False)
    assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape == (1, 6)
