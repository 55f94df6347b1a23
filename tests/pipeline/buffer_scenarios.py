"""Modules that write into buffers which several stages have, and what they leave there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.blocks import HIDDEN
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.tasks import TokenTask


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Noted(nn.Module):
    """Centres by a running mean, and counts its calls; runs at some of the places around and between the layers.

    Args:
        places: numbers of the layers before which it runs; 4 is behind them.
        assigns: whether it assigns its buffers anew instead of writing into them.
        lags: whether it centres by the mean as it was before this call, as codebooks do.
    """

    def __init__(self, *places: int, assigns: bool = False, lags: bool = False) -> None:
        super().__init__()
        self.places, self.assigns, self.lags = places, assigns, lags
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.register_buffer("calls", torch.zeros(()))

    def note(self, x: Tensor) -> Tensor:
        before = self.mean.clone()
        if self.training:
            with torch.no_grad():
                if self.assigns:
                    self.mean, self.calls = 0.9 * self.mean + 0.1 * x.mean((0, 1)), self.calls + 1
                else:
                    self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
                    self.calls += 1
        return x - (before if self.lags else self.mean.clone())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for place, layer in enumerate(self.layers):
            x = layer(self.note(x) if place in self.places else x)
        return self.head(self.note(x) if len(self.layers) in self.places else x)


class Normed(Noted):
    """Has a norm with running statistics instead, found by no reading of the code."""

    def __init__(self, norm: nn.Module, *places: int) -> None:
        super().__init__(*places)
        self.norm = norm

    def note(self, x: Tensor) -> Tensor:
        return getattr(self, "no" + "rm")(x.transpose(1, 2)).transpose(1, 2)


class Shared(Noted):
    """One norm in all layers."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(HIDDEN)
        self.layers = nn.ModuleList([nn.Sequential(nn.Flatten(0, 1), norm, Block()) for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).view(x.shape)
        return self.head(x)


class Stem(nn.Module):
    """Runs before the layers alone, as one part: embeds, follows statistics, and counts its calls in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.BatchNorm1d(HIDDEN)
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.count += 1
        if self.training:
            self.calls += 1
        return self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2)


class NormedBlock(Block):
    """Keeps its batch whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


class Stemmed(nn.Module):
    """Layers behind a stem.

    Args:
        block: makes a layer.
    """

    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.stem, self.head = Stem(), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList([block() for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Penalised(TokenTask):
    """Adds to the loss what ``state_dict`` lists of a layer, or counts its entries."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__(Noted())
        self.adds, self.entries = adds, len(self.state_dict())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.adds and len(self.state_dict()) != self.entries:
            raise AssertionError(list(self.state_dict()))
        penalty = sum(value.square().sum() for value in self.net.layers[0].state_dict(keep_vars=True).values())
        return super().training_step(batch, batch_idx) + (1e-2 * penalty if self.adds else 0.0)


def _norm(kind: str, *places: int) -> nn.Module:
    batch, instance = nn.BatchNorm1d, nn.InstanceNorm1d
    norm = batch(HIDDEN, affine=kind == "affine") if kind != "instance" else instance(HIDDEN, track_running_stats=True)
    return Normed(norm, *places)


NETS: dict[str, Any] = {
    "before": lambda: Noted(0),
    "assigned": lambda: Noted(0, assigns=True),
    "between": lambda: Noted(1),
    "behind": lambda: Noted(4),
    "lagging_before": lambda: Noted(0, lags=True),
    "lagging_between": lambda: Noted(2, lags=True),
    "lagging_behind": lambda: Noted(4, lags=True),
    "norm_before": lambda: _norm("plain", 0),
    "affine_before": lambda: _norm("affine", 0),
    "instance_before": lambda: _norm("instance", 0),
    "norm_between": lambda: _norm("plain", 1),
    "affine_between": lambda: _norm("affine", 3),
    "norm_behind": lambda: _norm("affine", 4),
    "norm_around": lambda: _norm("plain", 0, 4),
    "norm_everywhere": lambda: _norm("affine", 0, 1, 2, 3),
    "norm_shared": Shared,
    "stem": lambda: Stemmed(Block),
    "stem_whole": lambda: Stemmed(NormedBlock),
}


def train(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """Trains the module called ``name``; its whole state, and its buffers as hooks see them."""
    torch.manual_seed(7)
    module = Penalised(adds=name == "penalty") if name in ("penalty", "listing") else TokenTask(NETS[name]())
    module = module.double()
    trainer = trainer_for(info, layout, arguments, max_epochs=1)
    trainer.fit(module)
    state = module.state_dict() if layout is None else trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    counts = {f"{name}.count": torch.tensor(m.count) for name, m in module.named_modules() if isinstance(m, Stem)}
    return {name: value.clone() for name, value in state.items()} | counts
