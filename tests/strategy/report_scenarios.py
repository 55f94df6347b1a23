"""Runs with a report, at one layout or another."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.callbacks import RunReport
from lightning_megatron.models import CausalLanguageModel
from tests.harness import RankInfo
from tests.models.scenarios import CONFIGS, Losses
from tests.parity.train import make_trainer

STEPS, BATCH, SEQUENCE = 6, 8, 12


class Warner(Callback):
    """Warns on every rank, in every step."""

    def on_train_batch_start(self, *_: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("mind the <gap>", stacklevel=1)


class Rows(Dataset[Any]):
    """Random rows of tokens."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> Any:
        return torch.randint(0, 256, (SEQUENCE + 1,), generator=torch.Generator().manual_seed(index))


def report(
    info: RankInfo, config: str, sizes: dict[str, Any], with_report: bool = True
) -> tuple[float, list[float], str, bool]:
    """FLOPs of a step, losses, and the page with whether curves were drawn (on rank 0)."""
    callback, losses, folder = RunReport(info.directory), Losses(), Path(info.directory)
    strategy = MegatronStrategy(**sizes)
    callbacks = [losses, Warner(), callback] if with_report else [losses]
    torch.manual_seed(5)
    trainer = make_trainer(
        info, strategy, max_steps=STEPS, limit_val_batches=1, num_sanity_val_steps=0, callbacks=callbacks
    )
    module = CausalLanguageModel(replace(CONFIGS[config], vocabulary=256), lr=1e-2)
    replicas = strategy.distributed_sampler_kwargs["num_replicas"]
    loader = DataLoader(Rows(), BATCH // replicas)
    trainer.fit(module, loader, loader)
    page = callback.path.read_text() if callback.path is not None else ""
    return callback.flops, losses.seen, page, (folder / "curves.png").is_file()
