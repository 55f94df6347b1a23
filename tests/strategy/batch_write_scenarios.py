"""Steps that write into their batch, in place or by key."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, default_collate

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.blocks import HIDDEN
from tests.parity.zoo.data import BATCH, VOCABULARY
from tests.parity.zoo.tasks import Task
from tests.pipeline.buffer_scenarios import Block

SEQUENCE = 6
KINDS = ("tokens", "targets", "shared", "key", "alias", "nested", "behind")


class Net(nn.Module):
    """Layers that are given the batch's weights of places too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        """Logits of tokens [b, s]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x) * scale[:, None]
        return self.head(x)


class Writes(Task):
    """Writes into what it is given."""

    def __init__(self, kind: str, batch: int) -> None:
        super().__init__()
        self.kind, self.size, self.net = kind, batch, Net()

    def train_dataloader(self) -> DataLoader[Any]:
        """Of tokens, with weights that all samples share."""
        rows = torch.randint(0, VOCABULARY, (3 * BATCH, SEQUENCE), generator=torch.Generator().manual_seed(3))
        return DataLoader(list(rows), batch_size=self.size, collate_fn=self._collate)  # type: ignore[arg-type]

    def _collate(self, rows: list[Tensor]) -> dict[str, Any]:
        tokens = default_collate(rows)
        scale = torch.linspace(0.5, 1.5, SEQUENCE, dtype=torch.float64)
        return {"tokens": tokens, "targets": tokens.roll(-1, 1), "scale": scale, "again": tokens[:, 1:], "more": {}}

    val_dataloader = train_dataloader

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Does the same."""
        self.log("loss", self.training_step(batch, batch_idx), batch_size=len(batch["tokens"]))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Changes something first, so that doing it twice is another step."""
        if self.kind == "tokens":
            batch["tokens"].add_(1).remainder_(VOCABULARY)
        elif self.kind == "targets":
            batch["targets"].add_(3).remainder_(VOCABULARY)
        elif self.kind == "shared":
            batch["scale"].mul_(1.3)
        elif self.kind == "key":
            batch["tokens"] = (batch["tokens"] + 1) % VOCABULARY
            batch["count"] = batch.get("count", 0) + 1
        elif self.kind == "alias":
            batch["again"].add_(1).remainder_(VOCABULARY)
        elif self.kind == "nested":
            batch["more"]["seen"] = [batch.pop("targets").clone(), batch["tokens"]]
            batch["targets"] = batch["more"]["seen"][0]
        logits = self.net(batch["tokens"], batch["scale"])
        if self.kind == "behind":
            batch["best"] = logits.argmax(-1)
            batch["targets"][batch["best"] == batch["targets"]] = 0
        return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()) * batch.get("count", 1)


class Sees(Callback):
    """Keeps what is left of batches."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Copies them."""
        self.batches.append(copy.deepcopy(batch))

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, _: int = 0
    ) -> None:
        """Copies them."""
        self.batches.append(copy.deepcopy(batch))


def train(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Trains; the whole state, and batches as hooks see them behind their step."""
    torch.manual_seed(7)
    sees = Sees()
    module = Writes(kind, BATCH if layout is None else BATCH // layout[1]).double()
    trainer = trainer_for(info, layout, arguments, max_epochs=2, limit_val_batches=0, callbacks=[sees])
    trainer.fit(module)
    state = module.state_dict() if layout is None else trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    whole = layout is None or layout[1] == 1
    return {"state": {name: value.clone() for name, value in state.items()}, "batches": sees.batches if whole else []}


def evaluate(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Validates; what is logged, and batches as hooks see them behind their step."""
    torch.manual_seed(7)
    sees = Sees()
    trainer = trainer_for(info, layout, arguments, callbacks=[sees])
    (logged,) = trainer.validate(Writes(kind, BATCH).double(), verbose=False)
    return {"logged": logged, "batches": sees.batches}
