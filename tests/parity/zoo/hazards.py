"""Modules whose loss reads more than the last hidden state: under a pipeline they are right or refused, never wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from tests.parity.zoo.blocks import HEADS, HIDDEN, Block
from tests.parity.zoo.data import LENGTH, VOCABULARY
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask


class AuxiliaryBlock(Block):
    """Returns a loss of its own besides its output, and keeps it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out = super().forward(x)
        self.auxiliary = out.square().mean()
        return out, self.auxiliary


class AuxiliaryLoss(nn.Module):
    """Adds up what the layers return beside their output, as mixtures of experts do."""

    def __init__(self, kept: bool = False) -> None:
        super().__init__()
        self.kept = kept
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList([AuxiliaryBlock() for _ in range(4)])

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, returned = self.embed(tokens), []
        for layer in self.layers:
            x, auxiliary = layer(x)
            returned.append(auxiliary)
        total = [layer.auxiliary for layer in self.layers] if self.kept else returned
        return self.head(x), torch.stack(total).sum()


class AuxiliaryTask(TokenTask):
    """Cross-entropy and a hundredth of the auxiliary loss."""

    def loss(self, batch: Any) -> Tensor:
        logits, auxiliary = self.net(batch[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) + 0.01 * auxiliary

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])[0]


class WeightPenalty(TokenTask):
    """Adds a penalty on every parameter to the loss by hand."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def loss(self, batch: Any) -> Tensor:
        penalty = torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()
        return super().loss(batch) + 1e-3 * penalty


class DeepSupervision(Walker):
    """The head reads every layer's output."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, outputs = self.embed(tokens), []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return self.head(torch.stack(outputs).mean(0))


class Towers(nn.Module):
    """Two stacks of the same size that never meet before the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Walker(), Walker()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.left(tokens) + self.right(tokens.flip(1))


class Reentrant(Walker):
    """Recomputes its layers the old way."""

    def walk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.training else block(x)
        return x


class PerLayerMasks(Walker):
    """Hands every layer a bias of its own from a buffer, as local and global attention alternate."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.randn(4, HEADS, LENGTH, LENGTH))

    def walk(self, x: Tensor) -> Tensor:
        for bias, block in zip(self.bias, self.blocks, strict=True):
            x = block(x, None, bias)
        return x


class ExtraTensors(TokenTask):
    """Batches carry a scalar, class weights that have no batch dimension, and a loss that changes with the step."""

    def __init__(self) -> None:
        super().__init__(Walker())

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        batch = default_collate(samples)
        weights = torch.linspace(0.5, 1.5, VOCABULARY)
        return {**batch, "temperature": torch.tensor(2.0), "weights": weights, "batch_size": len(samples)}

    def loss(self, batch: Any) -> Tensor:
        assert batch["temperature"].dim() == 0 and len(batch["weights"]) == VOCABULARY
        logits = self.net(batch["tokens"]) / batch["temperature"]
        losses = F.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none")
        scaled = losses * batch["weights"][batch["targets"]]
        return scaled.mean() * (1 + 0.1 * self.trainer.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True, batch_size=len(batch["tokens"]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["tokens"]))
