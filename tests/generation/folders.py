"""Tiny Hugging Face folders, the command line on ranks, and what plain Hugging Face generates from the same folder."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lightning_megatron import MegatronStrategy
from tests.examples.script import torchrun_environment
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.parity.zoo.huggingface import CONFIGS

LETTERS = 59  # of the tokenizer, beside the end
TEXTS = ["AB", "CDEFG", "H", "IJKLMNOP", "QR", "STUVW", "XY"]
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 20}


def make_tokenizer(letters: int = LETTERS) -> PreTrainedTokenizerFast:
    """One token for each letter, and one for the end."""
    alphabet = {"<end>": 0, **{chr(65 + at): at + 1 for at in range(letters)}}
    words = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")


def make_folder(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float64) -> Path:
    """A model whose tokens vary, and its tokenizer."""
    import transformers

    kind, model, options = CONFIGS[family]
    config = getattr(transformers, kind)(**{**options, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0})
    config.vocab_size = LETTERS + 5
    if hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = 128
    torch.manual_seed(3)
    made = getattr(transformers, model)(config).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    made.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def experts_of(config: Any) -> dict[str, str]:
    """How experts multiply in float64, for models that have some; a config does not keep it."""
    return {"experts_implementation": "eager"} if hasattr(config, "num_experts_per_tok") else {}


def expected(folder: Path, texts: list[str], batch: int = 8, seed: int = 0, **options: Any) -> list[list[int]]:
    """Tokens of ``AutoModelForCausalLM.generate``, with padding by the tokenizer itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **experts_of(AutoConfig.from_pretrained(folder)))
    words = AutoTokenizer.from_pretrained(folder, padding_side="left")
    words.pad_token = words.eos_token
    found = []
    for number, start in enumerate(range(0, len(texts), batch)):
        torch.manual_seed(seed + number)
        inputs = words(texts[start : start + batch], return_tensors="pt", padding=True, return_token_type_ids=False)
        tokens = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :].tolist()
        found += [row[: row.index(0) + 1] if 0 in row else row for row in tokens]
    return found


def interrupted(info: RankInfo, arguments: list[str]) -> int:
    """The same, killed before parts become one file."""
    from lightning_megatron.strategy.generation import files

    with mock.patch.object(files, "put_together"):
        return commanded(info, arguments)


def commanded(info: RankInfo, arguments: list[str]) -> int:
    """The command on a rank, as ``torchrun`` starts it; returns its exit code."""
    from lightning_megatron.tools.commands.cli import app

    os.environ.update(torchrun_environment(info))
    store = info.meet()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        try:
            app(arguments)
        except SystemExit as ended:
            return int(ended.code or 0)
        finally:
            del store
            sys.stdout.flush()
    return 0


class Trained(pl.LightningModule):
    """A model from a folder, which trains."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").train()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(info: RankInfo, folder: str, path: str) -> None:
    """One step, and a checkpoint."""
    trainer = make_trainer(info, MegatronStrategy(info.world_size), max_steps=1)
    trainer.fit(Trained(folder), DataLoader(torch.arange(1, 41).view(4, 10), batch_size=4))  # type: ignore[arg-type]
    trainer.save_checkpoint(path)


class Two(Trained):
    """Two models from a folder, one of which trains."""

    def __init__(self, folder: str) -> None:
        pl.LightningModule.__init__(self)
        self.model, self.second = (AutoModelForCausalLM.from_pretrained(folder, dtype="auto").train() for _ in range(2))


def train_two(info: RankInfo, folder: str, path: str) -> None:
    """One step of such a module, and a checkpoint."""
    trainer = make_trainer(info, MegatronStrategy(), max_steps=1)
    trainer.fit(Two(folder), DataLoader(torch.arange(1, 41).view(4, 10), batch_size=4))  # type: ignore[arg-type]
    trainer.save_checkpoint(path)


def listed(info: RankInfo, folder: str, sizes: tuple[int, int, int], options: dict[str, Any]) -> list[Any]:
    """``strategy.generate`` after a step that changes nothing: tokens, texts, and whether all is as it was."""
    strategy = MegatronStrategy(*sizes)
    trainer = make_trainer(info, strategy, max_steps=1)
    module = Trained(folder)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(torch.arange(1, 41).view(4, 10), batch_size=4))  # type: ignore[arg-type]
    before = torch.get_rng_state()
    words = AutoTokenizer.from_pretrained(folder)
    ids = [words(text)["input_ids"] for text in TEXTS]
    tokens = strategy.generate(ids, batch_size=2, max_new_tokens=6, **options)
    texts = strategy.generate(TEXTS, tokenizer=words, batch_size=2, max_new_tokens=6, **options)
    unchanged = torch.equal(before, torch.get_rng_state()) and module.model.training
    return [tokens, texts, unchanged]


def refused(info: RankInfo, folder: str, prompts: Any, options: dict[str, Any], arguments: Any = None) -> str:
    """What ``strategy.generate`` raises; by default with two stages."""
    strategy = MegatronStrategy(**(arguments or {"pipeline_parallel_size": 2}))
    trainer = make_trainer(info, strategy, max_steps=1)
    trainer.fit(Trained(folder), DataLoader(torch.arange(1, 41).view(4, 10), batch_size=4))  # type: ignore[arg-type]
    try:
        strategy.generate(prompts, **options)
    except ValueError as error:
        return str(error)
    return "nothing"
