"""LightningModules that are their own network, each with habits of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.parity.zoo.blocks import HIDDEN, Block
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.tasks import Task


class FlatModule(Task):
    """Layers directly on the LightningModule; loss averaged by hand from ``self.outputs`` at the end of validation."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.outputs: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        batch = default_collate(samples)
        return batch["tokens"], batch["targets"]

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.outputs.append(loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", torch.stack(self.outputs).mean(), sync_dist=True)
        self.outputs.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"next": self(batch[0])[:, -1].argmax(-1), "first": batch[0][:, 0]}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Plateau(FlatModule):
    """A schedule that watches a logged metric, and gradients looked at in a hook."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class OneOptimizer(FlatModule):
    """Returns just an optimizer, momentum SGD, and passes the whole batch on as a keyword-only step would."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


class EndGroups(FlatModule):
    """Groups by part of the network, so that some stages have nothing in some groups; rates go up and down."""

    def configure_optimizers(self) -> Any:
        parts = [(self.embed, 5e-3), (self.layers, 1e-2), (self.norm, 2e-2), (self.head, 3e-3)]
        groups = [{"params": list(part.parameters()), "lr": rate} for part, rate in parts]
        optimizer = torch.optim.AdamW(groups, amsgrad=True)
        rates = [rate for _, rate in parts]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=8)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 1}]


class Fused(FlatModule):
    """torch's fused AdamW, and a schedule made of two."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], milestones=[2])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
