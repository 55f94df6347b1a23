"""LightningModules around the zoo's networks: the habits of users, batch by batch and hook by hook."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from tests.parity.zoo.data import TRAIN, VALIDATION, Items, loader


class Task(LightningModule):
    """What the others share: loaders, one optimizer with two groups, a per-step schedule."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        if net is not None:
            self.net = net

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        return default_collate(samples)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self, Items(TRAIN), self.collate)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self, Items(VALIDATION, seed=1), self.collate)

    def test_dataloader(self) -> DataLoader[Any]:
        return loader(self, Items(VALIDATION, seed=2), self.collate)

    def predict_dataloader(self) -> DataLoader[Any]:
        return loader(self, Items(VALIDATION, seed=3), self.collate)

    def loss(self, batch: Any) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no loss")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        named = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        decay = [parameter for _, parameter in named if parameter.dim() >= 2]
        rest = [parameter for _, parameter in named if parameter.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TokenTask(Task):
    """Tuple batches of tokens and targets; the network returns logits."""

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        batch = default_collate(samples)
        return batch["tokens"], batch["targets"]

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        logits = self.net(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, _ = batch
        return self.net(tokens).argmax(-1)


class OwnLossTask(TokenTask):
    """The network computes the loss itself when it is given targets; the step returns a dictionary."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        logits, loss = self.net(*batch)
        accuracy = (logits.argmax(-1) == batch[1]).double().mean()
        self.log_dict({"train_loss": loss, "accuracy": accuracy}, prog_bar=True, sync_dist=True)
        return {"loss": loss, "batch_size": torch.tensor(len(batch[0]))}

    def loss(self, batch: Any) -> Tensor:
        return self.net(*batch)[1]

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])[0].argmax(-1)


class MaskedTask(Task):
    """Dictionary batches with a key padding mask; the loss averages each row over its real tokens."""

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        batch = default_collate(samples)
        return {"input_ids": batch["tokens"], "padding": batch["mask"], "target": batch["targets"]}

    def loss(self, batch: Any) -> Tensor:
        logits = self.net(batch["input_ids"], batch["padding"])
        losses = F.cross_entropy(logits.transpose(1, 2), batch["target"], reduction="none")
        return ((losses * batch["padding"]).sum(1) / batch["padding"].sum(1)).mean()


class NestedTask(Task):
    """Nested batches: a dictionary with a list, a dictionary and a string; the step takes no batch index."""

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        batch = default_collate(samples)
        return {
            "inputs": {"ids": batch["tokens"], "extra": [batch["features"], {"mask": batch["mask"]}]},
            "answers": (batch["targets"], batch["classes"]),
            "source": "a corpus",
        }

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch["answers"][1]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["answers"][1]))

    def loss(self, batch: Any) -> Tensor:
        features, masks = batch["inputs"]["extra"]
        logits, classes = self.net(batch["inputs"]["ids"], features, masks["mask"])
        targets, wanted = batch["answers"]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.5 * F.cross_entropy(classes, wanted)


class ImageTask(Task):
    """Images to classes, with a torchmetrics object per split."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.train_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=5)
        self.val_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=5)

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        batch = default_collate(samples)
        return [batch["images"], batch["classes"]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, classes = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, classes)
        self.train_accuracy(logits, classes)
        self.log("train_loss", loss, sync_dist=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, classes = batch
        logits = self.net(images)
        self.val_accuracy.update(logits, classes)
        self.log("val_loss", F.cross_entropy(logits, classes), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy)


class TensorTask(Task):
    """A batch that is one tensor; the loss is a reconstruction error."""

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        return default_collate(samples)["features"]

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.net(batch[:, :-1]), batch[:, 1:])

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)
