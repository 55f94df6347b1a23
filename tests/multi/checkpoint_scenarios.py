"""Writes checkpoints for tests of the files themselves: a tied model, and a Hugging Face model, over 2 × 2 ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.reshard_scenarios import Losses, Tied
from tests.parity.train import make_trainer


def gpt2() -> Any:
    """A Hugging Face model of two layers; attention heads and vocabulary in odd numbers."""
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=101, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


class HuggingFace(LightningModule):
    """Trains a Hugging Face model that it keeps under the name ``net``."""

    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(2)
        self.net = gpt2()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(torch.randint(0, 101, (16, 8), generator=generator), batch_size=4)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])


class Dangerous:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def trainer_of(info: RankInfo, steps: int = 2, sizes: tuple[int, int, int] = (2, 1, 2), **options: Any) -> Trainer:
    """Pipeline, data, tensor; float32, because Hugging Face models compute in it."""
    strategy = MegatronStrategy(*sizes, micro_batch_size=2)
    return make_trainer(info, strategy, max_steps=steps, precision="32-true", **options)


def write_both(info: RankInfo, folder: str) -> None:
    """``tied.ckpt`` and ``hf.ckpt``."""
    trainer = trainer_of(info, callbacks=[Losses()])
    trainer.fit(Tied(seed=4))
    trainer.save_checkpoint(f"{folder}/tied.ckpt")
    trainer = trainer_of(info)
    trainer.fit(HuggingFace(rate=3e-3))
    trainer.save_checkpoint(f"{folder}/hf.ckpt")


def resume_imported(info: RankInfo, path: str, sizes: tuple[int, int, int]) -> list[float]:
    """Losses after continuing from a checkpoint made by two steps."""
    losses = Losses()
    trainer = trainer_of(info, 4, sizes, callbacks=[losses])
    trainer.fit(Tied(seed=5), ckpt_path=path)
    return losses.values
