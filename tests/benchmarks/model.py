"""The small GPT that every contestant trains: one definition, cut by hand only for the peer that needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """Dimensions of a run; ``micro_batches`` per step and replica, each of ``micro_batch`` sequences."""

    layers: int = 8
    hidden: int = 128
    heads: int = 4
    sequence: int = 64
    vocabulary: int = 512
    micro_batches: int = 8
    micro_batch: int = 1

    @property
    def batch(self) -> int:
        return self.micro_batches * self.micro_batch


class Block(nn.Module):
    """Pre-norm transformer block with fused attention; ``[batch, seq, hidden]`` to the same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.qkv, self.out = nn.Linear(size.hidden, 3 * size.hidden), nn.Linear(size.hidden, size.hidden)
        self.up, self.down = nn.Linear(size.hidden, 4 * size.hidden), nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        query, key, value = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Tokens ``[batch, seq]`` to logits ``[batch, seq, vocabulary]``."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Parameter(torch.randn(size.sequence, size.hidden) * 0.02)
        self.layers = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over ``[batch, seq, vocabulary]`` logits."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Task(LightningModule):
    """An ordinary LightningModule around `GPT`."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.net = GPT(size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = token_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every contestant."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def make_batches(size: Size, count: int, sequences: int) -> list[tuple[Tensor, Tensor]]:
    """``count`` batches of ``sequences`` token rows and their targets."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, size.vocabulary, (count, sequences, size.sequence + 1), generator=generator)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in rows]
