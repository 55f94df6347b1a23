"""Networks whose parts know each other: shared tables, caches filled on the way, layers asked before they run, values
that pass the layers by.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from tests.parity.zoo.blocks import HEADS, HIDDEN, Block
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.loops import Walker


@functools.lru_cache
def distances(length: int) -> Tensor:
    """A table outside of all modules, made at the first call and kept."""
    steps = torch.arange(length)
    return -(steps[:, None] - steps[None]).abs().double()


class Slopes(nn.Module):
    """A buffer, and a table made from it when it is first needed."""

    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.linspace(0.1, 0.5, HEADS, dtype=torch.float64))
        self.table: Tensor | None = None

    def forward(self, length: int) -> Tensor:
        if self.table is None or self.table.size(-1) != length:
            self.table = self.slopes[:, None, None] * distances(length)
        return self.table


class SlopedBlock(Block):
    """Asks a module that all layers share for its bias."""

    def __init__(self, shared: Slopes) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, bias=self.shared(x.size(1)))


class SharedTable(Walker):
    """One lazily filled table for all layers."""

    def __init__(self) -> None:
        super().__init__()
        shared = Slopes()
        self.blocks = nn.ModuleList([SlopedBlock(shared) for _ in range(4)])


class Cell(nn.Module):
    """A recurrent layer that says what its first state is."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.norm = nn.Linear(2 * HIDDEN, 2 * HIDDEN), nn.LayerNorm(HIDDEN)

    def first_state(self, like: Tensor) -> Tensor:
        return torch.zeros(like.size(0), HIDDEN, dtype=self.gates.weight.dtype)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for step in x.unbind(1):
            gate, new = self.gates(torch.cat([step, state], -1)).chunk(2, -1)
            state = torch.lerp(state, new.tanh(), gate.sigmoid())
            outputs.append(state)
        return x + self.norm(torch.stack(outputs, 1)), state


class AskedFirst(nn.Module):
    """Asks every layer for its first state before the embedding is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([Cell() for _ in range(4)])
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        states = [cell.first_state(tokens) for cell in self.cells]
        x, last = self.embed(tokens), []
        for cell, state in zip(self.cells, states, strict=True):
            x, state = cell(x, state)
            last.append(state)
        return self.head(x)


class Conditioned(Walker):
    """Every layer, and the head after them, is conditioned on a vector that parameters make."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Sequential(nn.Linear(1, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.scale = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList([ConditionedBlock() for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        condition = self.condition((tokens.sum(1, keepdim=True) % 7).to(x.dtype))[:, None]
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x * (1 + self.scale(condition)))


class ConditionedBlock(Block):
    """Shifts its input by a learned function of the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + self.shift(condition))


class EmbeddingSkip(Walker):
    """The embedding's output is used between the layers without its gradient, and again after them."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embed(tokens)
        middle = first.detach().mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x + middle)
        return self.head(x + first)


class CutBetween(Walker):
    """Every layer gets its part of what is computed before them; a branch of the loop may cut all of it shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.last = nn.Linear(HIDDEN, 4 * HIDDEN), 3

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        parts = self.parts(x).unflatten(-1, (4, HIDDEN))
        for index, block in enumerate(self.blocks):
            if index == self.last:
                x, parts = self.cut(x, parts)
            x = block(x + 0.1 * parts[:, :, index])
        return self.head(x)

    def cut(self, x: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        """The same, twice as large."""
        return 2 * x, 2 * parts


class EmbeddingMask(Walker):
    """Rows of the embedding that are zero mark padding: a mask that has no gradient and depends on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.embed.weight[:4] = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = x.abs().sum(-1) > 0
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class Distilled(Walker):
    """Adds the logits of a frozen teacher, which is a list of layers too."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Walker(2).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(tokens)
        return self.head(self.walk(self.embed(tokens))) + wanted
