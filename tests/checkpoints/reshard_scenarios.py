"""Saves a run at one layout, loads it at another, saves that again, and goes on training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import MegatronCheckpointIO, MegatronStrategy
from lightning_megatron.checkpoints.files.directory import open_checkpoint
from lightning_megatron.checkpoints.files.storage import BoxReader, Place, read_part
from tests.harness import RankInfo
from tests.parity.train import make_trainer

VOCABULARY, HIDDEN, HEADS, LENGTH, GLOBAL_BATCH, SAMPLES = 101, 12, 6, 6, 12, 60
SAVED, END = 3, 7  # five steps an epoch: saved in the middle of the first, ended in the second


@dataclass(frozen=True)
class Grid:
    """Sizes of one side of a pair; the micro-batches follow from the replicas."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    chunks: int = 1
    context: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "64-true"

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    def strategy(self) -> MegatronStrategy:
        options: dict[str, Any] = {"micro_batch_size": 2, **self.options}
        if self.chunks > 1:
            options |= {"pipeline_schedule": "interleaved", "virtual_pipeline_parallel_size": self.chunks}
        return MegatronStrategy(self.pipeline, self.data, self.tensor, context_parallel_size=self.context, **options)


class Words(Dataset[Tensor]):
    """Random token sequences [LENGTH + 1], of which every sample is told apart by its first two tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class Attention(nn.Module):
    """Causal self-attention with a packed projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, -1, HIDDEN // HEADS).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    """Attention and an MLP with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 24), nn.GELU(), nn.Linear(24, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Tied(LightningModule):
    """A language model whose head is its embedding; 101 words, which no tensor-parallel size divides."""

    def __init__(self, width: int = HIDDEN, seed: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) / 10)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.scale

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, on_step=True, on_epoch=False, sync_dist=True)
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        replicas = self.trainer.strategy.mesh.layout.data  # type: ignore[attr-defined]
        return DataLoader(Words(), batch_size=GLOBAL_BATCH // replicas)

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class Losses(Callback):
    """Collects the logged loss of every step, and saves one checkpoint in the middle."""

    def __init__(self, path: str | None = None) -> None:
        self.values: list[float] = []
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics["loss"]))
        if self.path is not None and trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


def trainer_of(info: RankInfo, grid: Grid, steps: int, callback: Callback) -> Trainer:
    """Lightning's own distributed sampler shuffles and deals samples out."""
    return make_trainer(
        info,
        grid.strategy(),
        max_steps=steps,
        callbacks=[callback],
        use_distributed_sampler=True,
        gradient_clip_val=0.5,
        precision=grid.precision,
    )


def first_run(info: RankInfo, grid: Grid, folder: str) -> list[float]:
    """The undisturbed run; it leaves a checkpoint in ``folder/saved.ckpt``. Returns its losses."""
    losses = Losses(f"{folder}/saved.ckpt")
    trainer_of(info, grid, END, losses).fit(Tied())
    return losses.values


def second_run(info: RankInfo, grid: Grid, folder: str) -> list[float]:
    """Loads at another layout, saves what was loaded as ``folder/again.ckpt``, goes on. Returns the losses after."""
    trainer = trainer_of(info, grid, SAVED, Losses())
    trainer.fit(Tied(seed=7), ckpt_path=f"{folder}/saved.ckpt")
    trainer.save_checkpoint(f"{folder}/again.ckpt")
    losses = Losses(f"{folder}/never.ckpt")
    trainer_of(info, grid, END, losses).fit(Tied(seed=8), ckpt_path=f"{folder}/saved.ckpt")
    return losses.values


def tensors_of(path: str | Path) -> dict[str, Tensor]:
    """Every stored tensor, assembled from its boxes."""
    data = open_checkpoint(path)
    metadata = BoxReader(data).read_metadata()
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        full = torch.zeros(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for chunk, place in zip(entry.chunks, metadata.storage_data[name], strict=True):  # type: ignore[union-attr]
            assert isinstance(place, Place)
            with data.open(place.file, "rb") as file:
                shape = tuple(chunk.sizes)
                part = read_part(file, place, shape, full.dtype, (0,) * len(shape), shape)
            full[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = part
        tensors[name] = full
    return tensors


def summary(path: str | Path) -> str:
    """One line that changes with any stored bit."""
    sums = {
        name: hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in sorted(tensors_of(path).items())
    }
    return json.dumps(sums)


__all__ = ["Grid", "MegatronCheckpointIO", "first_run", "second_run", "summary", "tensors_of"]
