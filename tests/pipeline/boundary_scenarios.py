"""Layers that hand on more than one tensor, of several dtypes, or write into what they are given."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.blocks import HIDDEN
from tests.parity.zoo.data import LENGTH, VOCABULARY
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask


class DictLayer(nn.Module):
    """Hands on a dict: the hidden state, a bfloat16 trace of it, and how often each sample was positive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x, (trace, count) = state["x"], state["inner"]
        x = x + torch.tanh(self.linear(x)) * (1 + count.to(x.dtype)[:, None, None] / 10)
        positive = (self.gate(x).mean((1, 2)) > 0).long()
        return {"x": x, "inner": (trace + 0.5 * x.mean(1).to(torch.bfloat16), count + positive)}


class PairLayer(nn.Module):
    """Takes and gives the hidden state and an integer as two values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        x = x + torch.tanh(self.linear(x)) * (1 + count.to(x.dtype)[:, None, None] / 10)
        return x, count + (x.mean((1, 2)) > 0).long()


class DictNet(nn.Module):
    """A dict through the layers."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList([DictLayer() for _ in range(layers)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        empty = torch.zeros(len(tokens), HIDDEN, dtype=torch.bfloat16)
        state = {"x": x, "inner": (empty, torch.zeros(len(tokens), dtype=torch.long))}
        for layer in self.layers:
            state = layer(state)
        trace, count = state["inner"]
        return self.head(state["x"] + trace.to(x.dtype)[:, None] + count[:, None, None])


class PairNet(nn.Module):
    """Two values through the layers."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList([PairLayer() for _ in range(layers)])

    def forward(self, tokens: Tensor) -> Tensor:
        x, count = self.embed(tokens), torch.zeros(len(tokens), dtype=torch.long)
        for layer in self.layers:
            x, count = layer(x, count)
        return self.head(x + count[:, None, None])


class WritingLayer(nn.Module):
    """Writes into its argument, and into the outputs of its own linears."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(HIDDEN))
        self.up, self.act, self.down = (
            nn.Linear(HIDDEN, 2 * HIDDEN),
            nn.ReLU(inplace=True),
            nn.Linear(2 * HIDDEN, HIDDEN),
        )

    def forward(self, x: Tensor) -> Tensor:
        x += self.shift
        return 0.5 * x + self.down(self.act(self.up(x)))


class WritingNet(nn.Module):
    """Layers that write into what they are given."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.Sequential(*[WritingLayer() for _ in range(layers)])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


class PlacedLayer(nn.Module):
    """Adds places to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x + places))


class PlacedNet(nn.Module):
    """Layers are given places, of which a small network makes points before the layers, to be added behind them."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.places = nn.Embedding(LENGTH, HIDDEN)
        self.point = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
        self.layers = nn.ModuleList([PlacedLayer() for _ in range(layers)])

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places.weight.unsqueeze(0).repeat(len(tokens), 1, 1)
        points, x = self.point(places), self.embed(tokens)
        for layer in self.layers:
            x = layer(x, places)
        return self.head(x + points)


NETS = {"placed": PlacedNet, "dict": DictNet, "pair": PairNet, "writing": WritingNet}


def handed_on(info: RankInfo, layout: Layout | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """Losses of five batches with validation; ``arguments["net"]`` says which network."""
    arguments = dict(arguments)
    net = arguments.pop("net", "dict")
    torch.manual_seed(5)
    module: LightningModule = TokenTask(NETS[net]())
    trainer = trainer_for(info, layout, arguments, max_steps=5)
    trainer.fit(module)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def dict_run(info: RankInfo, layout: Layout | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """A dict is handed on."""
    return handed_on(info, layout, {**arguments, "net": "dict"})


def pair_run(info: RankInfo, layout: Layout | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """Two values are handed on."""
    return handed_on(info, layout, {**arguments, "net": "pair"})


def writing_run(info: RankInfo, layout: Layout | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments are written into."""
    return handed_on(info, layout, {**arguments, "net": "writing"})


def placed_run(info: RankInfo, layout: Layout | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """An argument of the layers has been computed with."""
    return handed_on(info, layout, {**arguments, "net": "placed"})


class ChoosingLayer(nn.Module):
    """Chooses by its data, and by ``most``, which a hook sets, how many positions and tensors it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.most = nn.Linear(HIDDEN, HIDDEN), LENGTH

    def forward(self, x: Tensor) -> tuple[Tensor, float, list[Tensor]]:
        x = x + torch.tanh(self.linear(x))
        odd = int(x.detach().abs().sum() * 1000) % 2
        return x[:, : self.most - odd], float(x.detach().mean()), [x.square().mean()] * (1 + odd)


class Choosing(TokenTask):
    """Between its layers it reads lengths and numbers that another stage has chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList([ChoosingLayer() for _ in range(4)])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for index, layer in enumerate(self.layers):
            layer.most = LENGTH - index - batch_idx % 2

    def loss(self, batch: Any) -> Tensor:
        x, total = self.embed(batch[0]), torch.tensor(0.0)
        for layer in self.layers:
            x, number, further = layer(x)
            total = total + number + x.size(1) / 10 + len(further) / 7 + 0.1 * torch.stack(further).sum()
        return F.cross_entropy(self.head(x.mean(1)), batch[1][:, 0]) * (1 + total)


def choosing_run(info: RankInfo, layout: Layout | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """The loss of the last of four batches."""
    torch.manual_seed(5)
    trainer = trainer_for(info, layout, arguments, max_steps=4, limit_val_batches=0)
    trainer.fit(Choosing())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class Growing(TokenTask):
    """Reads longer sequences in each epoch, in validation too."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def loss(self, batch: Any) -> Tensor:
        length = 2 + 2 * self.current_epoch
        return super().loss((batch[0][:, :length], batch[1][:, :length]))


def growing_run(info: RankInfo, layout: Layout | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """The last losses of three epochs."""
    torch.manual_seed(5)
    trainer = trainer_for(info, layout, arguments, max_epochs=3)
    trainer.fit(Growing())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
