"""Batches whose samples do not lie along dimension 0, and such as nobody can cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trained_state
from tests.parity.zoo.blocks import HIDDEN
from tests.parity.zoo.data import BATCH, VOCABULARY
from tests.parity.zoo.tasks import TokenTask
from tests.strategy.writing_scenarios import Net

SEQUENCE = 6


class Opaque:
    """Has tensors, and does not say where."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens


class Cut(TokenTask):
    """Takes batches of one kind; adds positions, so that a piece of a sample does not fit."""

    def __init__(self, kind: str, batch: int) -> None:
        super().__init__(Net())
        self.kind, self.batch = kind, batch
        self.positions = torch.nn.Parameter(torch.linspace(-1, 1, SEQUENCE)[:, None])

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randint(0, VOCABULARY, (3 * BATCH, SEQUENCE), generator=torch.Generator().manual_seed(3))
        return DataLoader(list(rows), batch_size=self.batch, collate_fn=self._collate)  # type: ignore[arg-type]

    def _collate(self, rows: list[Tensor]) -> Any:
        tokens = torch.stack(rows)
        return {"packed": tokens.flatten(), "sequence_first": tokens.T.contiguous(), "opaque": Opaque(tokens)}[
            self.kind
        ]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """As the task does."""
        if self.kind == "packed":
            tokens = batch.view(self.batch, -1)
        else:
            tokens = batch.tokens if self.kind == "opaque" else batch.T
        logits = self.net(tokens) * (1 + self.positions)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


class Combined(TokenTask):
    """Takes batches of two loaders, of which one ends earlier with a smaller batch, and is then left out."""

    def __init__(self) -> None:
        super().__init__(Net())

    def train_dataloader(self) -> Any:
        rows = torch.randint(0, VOCABULARY, (5 * BATCH // 2, SEQUENCE), generator=torch.Generator().manual_seed(3))
        first = DataLoader(list(rows), batch_size=BATCH)  # type: ignore[arg-type]
        second = DataLoader(list(rows[: 3 * BATCH // 2]), batch_size=BATCH)  # type: ignore[arg-type]
        return CombinedLoader({"first": first, "second": second}, "max_size")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean loss of each."""
        losses = []
        for tokens in (batch["first"], batch["second"]):
            if tokens is not None:
                logits = self.net(tokens).flatten(0, 1)
                losses.append(functional.cross_entropy(logits, tokens.roll(-1, 1).flatten()))
        self.log("both", losses[-1])
        return torch.stack(losses).sum()


class Convolution(nn.Module):
    """Adds to each node what its neighbours give."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return x + torch.zeros_like(x).index_add(0, edges[1], torch.tanh(self.weight(x))[edges[0]])


class Graphs(LightningModule):
    """Takes batches of graphs, joined into one whose edges are pairs of its nodes.

    Args:
        size: graphs of a batch.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.returned = size, list[float]()
        self.embed, self.head = nn.Linear(3, HIDDEN), nn.Linear(HIDDEN, 1)
        self.layers = nn.ModuleList([Convolution() for _ in range(4)])

    def train_dataloader(self) -> DataLoader[Any]:
        draw = torch.Generator().manual_seed(3)
        sizes = [4, 3, 6, 5, 4, 7]
        rows = [(torch.randn(n, 3, generator=draw), torch.randint(0, n, (2, 2 * n), generator=draw)) for n in sizes]
        options = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        own = rows[options["rank"] :: options["num_replicas"]]
        return DataLoader(own, batch_size=self.size, collate_fn=self._joined)  # type: ignore[arg-type]

    def _joined(self, graphs: Any) -> dict[str, Tensor]:
        sizes = torch.tensor([len(nodes) for nodes, _ in graphs])
        starts = (sizes.cumsum(0) - sizes).tolist()
        return {
            "x": torch.cat([nodes for nodes, _ in graphs]).double(),
            "edges": torch.cat([edges + start for (_, edges), start in zip(graphs, starts, strict=True)], 1),
            "graph": torch.arange(len(graphs)).repeat_interleave(sizes),
            "goal": torch.stack([nodes.mean() for nodes, _ in graphs]).double(),
        }

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The error of what is read off the graphs."""
        x = self.embed(batch["x"])
        for layer in self.layers:
            x = layer(x, batch["edges"])
        sums = torch.zeros(len(batch["goal"]), HIDDEN).to(x).index_add(0, batch["graph"], x)
        return functional.mse_loss(self.head(sums)[:, 0], batch["goal"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def graphs(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], size: int = 2) -> dict[str, Any]:
    """Trains on graphs, ``size`` in a batch of each replica; the whole state, and what steps returned."""
    torch.manual_seed(7)
    module = Graphs(size).double()
    return {**trained_state(info, layout, arguments, module, max_epochs=1), "returned": module.returned}


def combined(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Trains on two loaders; the whole state."""
    torch.manual_seed(7)
    return trained_state(info, layout, arguments, Combined().double(), max_epochs=1)


def train(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Trains; the whole state."""
    torch.manual_seed(7)
    module = Cut(kind, BATCH if layout is None else BATCH // layout[1]).double()
    return trained_state(info, layout, arguments, module, max_epochs=1)
