"""Networks that walk through their layers in other ways than a plain loop, or have more around it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from tests.parity.zoo.blocks import HEADS, HIDDEN, Block
from tests.parity.zoo.data import LENGTH, VOCABULARY


class Walker(nn.Module):
    """Embedding, layers and head, for the classes below, which only differ in ``walk``."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])

    def walk(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda value, block: block(value), self.blocks, x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.walk(self.embed(tokens)))


class Indexed(Walker):
    """Takes its layers by index, counting down from the last."""

    def walk(self, x: Tensor) -> Tensor:
        for index in range(len(self.blocks)):
            x = self.blocks[-1 - index](x)
        return x


class Scaled(Walker):
    """Multiplies by a parameter of its own between the layers."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        self.scales = nn.ParameterList([nn.Parameter(torch.full((HIDDEN,), 0.9)) for _ in range(layers)])

    def walk(self, x: Tensor) -> Tensor:
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = block(x) * scale
        return x


class SequenceFirst(nn.Module):
    """torch's encoder as it comes: ``[seq, batch, hidden]``, positions in a buffer, nested tensors allowed."""

    positions: Tensor

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 2 * HIDDEN, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.register_buffer("positions", torch.randn(LENGTH, 1, HIDDEN))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.t()) + self.positions[: tokens.size(1)]
        mask = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        return self.head(self.encoder(x, mask)).transpose(0, 1)


class Dictionary(nn.Module):
    """Layers in a ``ModuleDict``, an extra input made by a small module, a list of two small heads."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.gate = nn.Linear(HIDDEN, LENGTH)
        self.layers = nn.ModuleDict({f"layer_{index}": Block() for index in range(layers)})
        self.heads = nn.ModuleList([nn.Linear(HIDDEN, VOCABULARY) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return sum(head(x) for head in self.heads) + 0.0 * self.gate.weight.sum()


class EncoderDecoder(nn.Module):
    """An encoder whose output goes, with its gradient, into every layer of a larger decoder."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        options = {"dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(HIDDEN, HEADS, HIDDEN, **options) for _ in range(2)])
        decoder = [nn.TransformerDecoderLayer(HIDDEN, HEADS, 2 * HIDDEN, **options) for _ in range(layers)]
        self.decoder = nn.ModuleList(decoder)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = x = self.embed(tokens)
        for layer in self.encoder:
            memory = layer(memory)
        causal = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=causal)
        return self.head(x)


class DenseSkips(Walker):
    """Every layer also reads the embedding's output, with its gradient."""

    def walk(self, x: Tensor) -> Tensor:
        first = x
        for block in self.blocks:
            x = block(x) + 0.1 * first
        return x
