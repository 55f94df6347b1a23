"""Decoding with keys and values in an object of the user's own, which layers write into."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.zoo.data import VOCABULARY

WIDTH, HEADS, DEPTH, MOST = 16, 4, 4, 16


class Allocated:
    """Room for the keys and values of all layers, of as many heads as come."""

    def __init__(self) -> None:
        self.keys: list[Any]
        self.values: list[Any]
        self.keys, self.values = ([None] * DEPTH for _ in range(2))
        self.length = 0

    def write(self, at: int, *new: Tensor) -> list[Tensor]:
        """Add keys and values to those of a layer, and give them all."""
        end = self.length + new[0].shape[2]
        for kept, tensor in zip((self.keys, self.values), new, strict=True):
            if kept[at] is None:
                kept[at] = tensor.new_zeros((*tensor.shape[:2], MOST, tensor.shape[3]))
            kept[at][:, :, self.length : end] = tensor
        return [kept[at][:, :, :end] for kept in (self.keys, self.values)]

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows."""
        for kept in (self.keys, self.values):
            kept[:] = [None if tensor is None else tensor[rows] for tensor in kept]


class _Layer(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.heads, self.norm = at, HEADS, nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, cache: Allocated | None) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if cache is not None:
            k, v = cache.write(self.at, k, v)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


class Allocates(pl.LightningModule):
    """A score without a cache, then beams with one, whose rows are put in another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MOST, WIDTH)
        self.layers = nn.ModuleList(_Layer(at) for at in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for parameter in self.parameters():
            parameter.data.mul_(4.0)

    def forward(self, ids: Tensor, cache: Allocated | None = None) -> Tensor:
        start = 0 if cache is None else cache.length
        x = self.embed(ids) + self.places(torch.arange(start, start + ids.shape[1]))
        for layer in self.layers:
            x = layer(x, cache)
        if cache is not None:
            cache.length += ids.shape[1]
        logits: Tensor = self.head(x)
        return logits

    def predict_step(self, batch: Tensor, index: int) -> Any:
        score = F.cross_entropy(self(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        beams = 3
        ids = new = batch.repeat_interleave(beams, 0)
        cache, total = Allocated(), torch.full((len(batch), beams), -1e9, dtype=torch.float64)
        total[:, 0] = 0
        for _ in range(5):
            each = self(new, cache)[:, -1].log_softmax(-1).view(len(batch), beams, -1)
            total, at = (total[..., None] + each).flatten(1).topk(beams, 1)
            rows = (at // VOCABULARY + torch.arange(len(batch))[:, None] * beams).flatten()
            cache.reorder(rows)
            new = (at % VOCABULARY).view(-1, 1)
            ids = torch.cat([ids[rows], new], 1)
        return score, ids, total
