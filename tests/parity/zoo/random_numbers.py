"""Modules that draw random numbers: in their layers, before, between and behind them, for samples and for all."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.tasks import TokenTask

WIDTH = 16


class Dropouts(nn.Module):
    """A transformer of torch's layers, with dropout wherever they have it."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.2, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.drop(x))
        return logits


class Noisy(nn.Module):
    """Stochastic depth by sample and for the whole batch, noise by feature, and a checkpoint of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.down(F.gelu(self.up(self.norm(x))))
        if torch.rand(()) < 0.2:
            return x
        inner: Any = checkpoint(lambda y: F.dropout(F.gelu(self.up(y)), 0.2), self.norm(x), use_reentrant=False)
        keep = x.new_empty(len(x), 1, 1).bernoulli_(0.8)
        return x + keep * self.down(inner) * (1 + 0.1 * torch.randn(WIDTH, dtype=x.dtype))


class Diffusion(TokenTask):
    """Noise and its strength drawn before the layers, more between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Noisy() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0])
        strength = torch.randint(1, 10, (len(x),)).to(x.dtype)[:, None, None] / 10
        noise = torch.randn_like(x)
        y = x + strength * noise
        for layer in self.layers:
            y = layer(y) + 0.01 * torch.randn(y.shape, dtype=y.dtype)
        return F.mse_loss(self.head(torch.distributions.Normal(y, 0.1).rsample()), noise)


class Mixup(TokenTask):
    """An order of all samples."""

    def loss(self, batch: Any) -> Tensor:
        mixed = batch[0][torch.randperm(len(batch[0]))]
        return F.cross_entropy(self.net(mixed).flatten(0, 1), batch[1].flatten())


class BySample(TokenTask):
    """A number for each sample, one by one."""

    def loss(self, batch: Any) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())
        return loss * torch.stack([torch.rand(()) for _ in batch[0]]).mean()


class Pythons(TokenTask):
    """Python's own generator."""

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten()) * random.random()


def make(name: str) -> TokenTask:
    """A module, by name."""
    if name == "diffusion":
        return Diffusion()
    tasks = {"dropouts": TokenTask, "mixup": Mixup, "by_sample": BySample, "pythons": Pythons}
    return tasks[name](Dropouts())
