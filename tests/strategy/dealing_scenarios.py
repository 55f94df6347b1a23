"""Runs that read dealt rows at some number of replicas, and go on at another."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy, data
from lightning_megatron.mesh.messages import objects
from tests.harness import RankInfo
from tests.parity.train import make_trainer

ROWS, BATCH, STOP = 26, 4, 8  # six batches a pass; stops in the second
STEPS = 17  # ends in the third


class Reader(LightningModule):
    """Notes what it reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["n"].double()[:, None] / ROWS
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def transfer_batch_to_device(self, batch: dict[str, Tensor], device: torch.device, dataloader_idx: int) -> Any:
        self.seen.append(batch["n"].tolist())  # this replica's; later hooks are given those of all
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def train_dataloader(self) -> Any:
        rows = Dataset.from_dict({"n": list(range(ROWS))})
        if self.kind == "rows":
            return data.deal(rows.with_format("torch"), BATCH, self.trainer, shuffle=True, seed=3)
        if self.kind == "packed streams":
            return data.deal(self.packed(rows), BATCH, self.trainer, passes=None, collate_fn=_first_tokens)
        mixed = data.mix([rows, rows.map(lambda row: {"n": row["n"] + 100})], [2, 1], seed=5)
        stream = mixed.to_iterable_dataset(num_shards=3).shuffle(seed=7, buffer_size=8)
        workers = int(self.kind == "stream in a worker")
        return data.deal(stream, BATCH, self.trainer, passes=None, num_workers=workers)

    def packed(self, rows: Dataset) -> Any:
        """Two sources of documents of several lengths, each packed, and mixed by rows."""
        documents = [
            rows.map(lambda row, add=add: {"input_ids": [row["n"] + add] * (1 + row["n"] % 5)})
            .to_iterable_dataset(num_shards=2)
            .shuffle(seed=2, buffer_size=5)
            for add in (0, 100)
        ]
        return data.mix([data.pack(source, 4, filler=0) for source in documents], [2, 1], seed=5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _first_tokens(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    return {"n": torch.tensor([row["input_ids"][0] for row in rows])}


class SaveAt(Callback):
    """Saves a checkpoint after one step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == STOP:
            trainer.save_checkpoint(self.path)


def read(info: RankInfo, kind: str, replicas: int, load: str | None, save: str | None) -> list[list[int]]:
    """By step, what all replicas read together, in the order that one replica has."""
    callbacks = [SaveAt(save)] if save else []
    options = {"use_distributed_sampler": True, "num_sanity_val_steps": 0, "max_steps": STEPS}
    trainer = make_trainer(info, MegatronStrategy(1, replicas), max_epochs=-1, callbacks=callbacks, **options)
    module = Reader(kind)
    trainer.fit(module, ckpt_path=load)
    everyone = objects.gather(module.seen)
    return [[sample for at in zip(*parts, strict=True) for sample in at] for parts in zip(*everyone, strict=True)]
