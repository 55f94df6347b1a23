"""Modules with activation checkpoints of their own around one layer, or several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.strategy.remedy_scenarios import WIDTH, Task, fit

__all__ = ["fit"]


class InSegments(Task):
    """torch's own split of a list of layers into two segments."""

    def run(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint_sequential(list(self.layers), 2, x, use_reentrant=False)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.run(self.embed(tokens)))
        return logits


class Around(InSegments):
    """One checkpoint around all layers; or around those from ``start`` to ``stop``."""

    start, stop, reentrant = 0, 4, False

    def several(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[self.start : self.stop]:
            x = layer(x)
        return x

    def run(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[: self.start]:
            x = layer(x)
        x = checkpoint(self.several, x, use_reentrant=self.reentrant)
        for layer in list(self.layers)[self.stop :]:
            x = layer(x)
        return x


class AroundLast(Around):
    start = 2


class Reentrant(Around):
    reentrant = True


class OutsideOthers(Around):
    """A checkpoint around all layers, each of which is in one of its own as well."""

    def several(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Twice(Around):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.loss((batch[1], batch[0]))


class InEvaluation(Around):
    """Only where nothing is trained, with gradients on in the first run under a pipeline."""

    def run(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().run(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class HookedOnly(Around):
    """Other hooks on what is saved, around all layers."""

    def run(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self.several(x)


class Frozen(Around):
    """Layers without gradients."""

    def run(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.several(x)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * gate


class Gated(Task):
    """Each layer in a checkpoint, with a second argument that is computed before the layers."""

    layer = Gate

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        gate = torch.sigmoid(x.sum(-1, keepdim=True))
        for layer in self.layers:
            x = checkpoint(layer, x, gate, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits


class GatedByName(Gated):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        gate = torch.sigmoid(x.sum(-1, keepdim=True)).detach()
        for layer in self.layers:
            x = checkpoint(layer, x, gate=gate, use_reentrant=False)
        logits: Tensor = self.head(x)
        return logits
