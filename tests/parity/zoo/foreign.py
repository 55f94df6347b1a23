"""Networks laid out as other people's repositories lay them out."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.zoo.blocks import HIDDEN, Attention, Bare, Block, Convolution
from tests.parity.zoo.data import VOCABULARY


class PreNorm(nn.Module):
    """Normalises and calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(HIDDEN), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x))


class Pairs(nn.Module):
    """A list of pairs that are never called themselves: ``for attention, feed_forward in self.layers``."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        pairs = [nn.ModuleList([PreNorm(Attention()), PreNorm(Bare())]) for _ in range(depth)]
        self.layers = nn.ModuleList(pairs)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for attention, feed_forward in self.layers:
            x = attention(x) + x
            x = feed_forward(x) + x
        return self.head(x)


class TwoLists(nn.Module):
    """Attention and feed-forward layers in two lists of the same length, residuals outside."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.attentions = nn.ModuleList([PreNorm(Attention()) for _ in range(depth)])
        self.feed_forwards = nn.ModuleList([PreNorm(Bare()) for _ in range(depth)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for attention, feed_forward in zip(self.attentions, self.feed_forwards, strict=True):
            x = x + attention(x)
            x = x + feed_forward(x)
        return self.head(x)


class Stack(nn.ModuleList):
    """A list with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class OwnStack(nn.Module):
    """Its layers are called through the list that holds them; one norm is shared by every gap."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.stack = Stack([Block() for _ in range(depth)])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.stack(self.embed(tokens)))


class SharedNorm(nn.Module):
    """One norm between all layers: a module that every stage uses."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.norm = nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.norm(layer(x))
        return self.head(x)


class TupleBlock(Block):
    """Takes and returns one tuple, so that it fits into an ``nn.Sequential``."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, bias = pair
        return super().forward(x, bias=bias), bias * 0.9


class TupleSequential(nn.Module):
    """A Sequential through which a pair of tensors travels, both with gradients."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.bias = nn.Parameter(torch.zeros(1, 1))
        self.layers = nn.Sequential(*[TupleBlock() for _ in range(depth)])

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.layers((self.embed(tokens), self.bias))
        return self.head(x)


class DictBlock(Block):
    """Takes and returns a dictionary."""

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {**state, "x": super().forward(state["x"], state["mask"]), "depth": state["depth"] + 1}


class DictState(nn.Module):
    """The state between layers is a dictionary of the hidden state, a mask and a number."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList([DictBlock() for _ in range(depth)])

    def forward(self, tokens: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": self.embed(tokens), "mask": tokens >= 0, "depth": 0}
        for layer in self.layers:
            state = layer(state)
        assert state["depth"] == len(self.layers)
        return self.head(state["x"])


class EmbeddingTwice(nn.Module):
    """The embedding is looked up before the layers and again after them."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + self.embed(tokens.roll(1, 1))) + F.linear(x, self.embed.weight)


class Stages(nn.Module):
    """Four Sequentials of three convolutions, each wider than the last. ``[batch, 3, 8, 8]`` to ``[batch, 5]``."""

    def __init__(self) -> None:
        super().__init__()
        widths = (4, 4, 8, 8)
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        for index, (before, after) in enumerate(zip((4, *widths), widths, strict=False)):
            same = {name: Convolution(after) for name in ("one", "two", "three")}
            parts = OrderedDict(change=nn.Conv2d(before, after, 1), **same)
            setattr(self, f"layer{index + 1}", nn.Sequential(parts))
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(images)))))
        return self.head(x.mean((2, 3)))
