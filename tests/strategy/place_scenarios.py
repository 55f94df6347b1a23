"""Modules whose steps keep something in unusual places, and go on from it; what strangers bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.strategy.carried_scenarios import Carries
from tests.strategy.loss_modules import VOCABULARY

LONG = 15_000


class Places(Carries):
    """Scales its loss by what earlier steps have kept."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(self.features(x))
        each = F.cross_entropy(logits, y[:, 0], reduction="none") * self.scales(y[:, 0])
        self.keep(y[:, 0], each.mean().item())
        return each.mean()

    def scales(self, words: Tensor) -> Any:
        """Of each sample."""
        raise NotImplementedError

    def keep(self, words: Tensor, loss: float) -> None:
        """For the next steps."""
        raise NotImplementedError

    def found(self) -> Any:
        """What has been kept."""
        raise NotImplementedError


class InArrays(Places):
    """Counts in an array, and the samples in one of NumPy's numbers; from a later step on, in one more."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.total, self.late = np.ones(VOCABULARY), np.float64(VOCABULARY), np.zeros(2)

    def scales(self, words: Tensor) -> Any:
        return torch.from_numpy(self.total / self.counts)[words] + float(self.late[0])

    def keep(self, words: Tensor, loss: float) -> None:
        np.add.at(self.counts, words.numpy(), 1)
        self.total = self.total + np.float64(len(words))
        if self.global_step >= 1:
            self.late[0] += 0.5

    def found(self) -> Any:
        return [torch.from_numpy(self.counts), float(self.total), torch.from_numpy(self.late)]


class OnTrainer(Places):
    """Counts in an attribute of the Trainer, which the first step makes."""

    def scales(self, words: Tensor) -> Any:
        return 1 + getattr(self.trainer, "words_seen", 0)

    def keep(self, words: Tensor, loss: float) -> None:
        self.trainer.words_seen = getattr(self.trainer, "words_seen", 0) + 1  # type: ignore[attr-defined]

    def found(self) -> Any:
        return self.trainer.words_seen  # type: ignore[attr-defined]


class ToldBySteps(Callback):
    """Counts what steps tell it, and the losses."""

    def __init__(self) -> None:
        self.large, self.losses = 0, list[float]()


class OnCallback(Places):
    """Counts samples in a callback."""

    def configure_callbacks(self) -> list[Callback]:
        return [ToldBySteps()]

    def callback(self) -> Any:
        """That counts."""
        return next(each for each in self.trainer.callbacks if isinstance(each, ToldBySteps))  # type: ignore[attr-defined]

    def scales(self, words: Tensor) -> Any:
        return 1 + self.callback().large

    def keep(self, words: Tensor, loss: float) -> None:
        self.callback().large += int((words > 8).sum())
        self.callback().losses.append(loss)

    def found(self) -> Any:
        return [self.callback().large, self.callback().losses]


class Levels(LightningDataModule):
    """Has a level."""

    def __init__(self, module: Places) -> None:
        super().__init__()
        self.module, self.level = module, 0

    def train_dataloader(self) -> Any:
        return self.module.train_dataloader()


class OnData(Places):
    """Counts samples in its data module."""

    def scales(self, words: Tensor) -> Any:
        return 1 + self.trainer.datamodule.level  # type: ignore[attr-defined]

    def keep(self, words: Tensor, loss: float) -> None:
        self.trainer.datamodule.level += int((words > 8).sum())  # type: ignore[attr-defined]

    def found(self) -> Any:
        return self.trainer.datamodule.level  # type: ignore[attr-defined]


class ForLater(Places):
    """Keeps what nothing reads: in a list of the Trainer, and under a key of each step in dictionaries of its data."""

    def on_fit_start(self) -> None:
        self.trainer.datamodule.words = {}  # type: ignore[attr-defined]

    def scales(self, words: Tensor) -> Any:
        return 1.0

    def keep(self, words: Tensor, loss: float) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if not hasattr(self.trainer, "losses"):
            self.trainer.losses, data.losses = [], {}  # type: ignore[attr-defined]
        self.trainer.losses.append(loss)  # type: ignore[attr-defined]
        data.losses[self.global_step] = loss
        data.words[self.global_step] = int((words > 8).sum())

    def found(self) -> Any:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        return [self.trainer.losses, data.losses, data.words]  # type: ignore[attr-defined]


def told(words: Tensor) -> None:
    """Counts its calls, and the words."""
    told.calls += 1  # type: ignore[attr-defined]
    told.words += int((words > 8).sum())  # type: ignore[attr-defined]


class OnFunction(Places):
    """Counts in attributes of a function."""

    def on_fit_start(self) -> None:
        told.calls = told.words = 0  # type: ignore[attr-defined]

    def scales(self, words: Tensor) -> Any:
        return 1 + told.calls + told.words  # type: ignore[attr-defined]

    def keep(self, words: Tensor, loss: float) -> None:
        told(words)

    def found(self) -> Any:
        return [told.calls, told.words]  # type: ignore[attr-defined]


class InLongLists(Places):
    """Appends to one long list, and counts in another, by word."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.words_seen = [0.0] * LONG, [0.0] * LONG

    def scales(self, words: Tensor) -> Any:
        return 1 + sum(self.losses[LONG:]) + torch.tensor([self.words_seen[100 * word] for word in words.tolist()])

    def keep(self, words: Tensor, loss: float) -> None:
        self.losses.append(loss)
        for word in words.tolist():
            self.words_seen[100 * word] += 1.0

    def found(self) -> Any:
        return [self.losses[LONG:], self.words_seen[::100]]


class UnderNewKeys(Places):
    """Counts under a key of each step, and in an attribute that a later step makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = dict[int, int]()

    def scales(self, words: Tensor) -> Any:
        return 1 + self.calls.get(self.global_step, 0) + getattr(self, "late", 0)

    def keep(self, words: Tensor, loss: float) -> None:
        self.calls[self.global_step] = self.calls.get(self.global_step, 0) + 1
        if self.global_step >= 1:
            self.late = getattr(self, "late", 0) + 1

    def found(self) -> Any:
        return [self.calls, self.late]


class UnderKeyOfLoss(UnderNewKeys):
    """Keeps a loss, once a hook has said so."""

    warm = False

    def keep(self, words: Tensor, loss: float) -> None:
        if self.warm:
            self.calls[7] = loss  # type: ignore[assignment]

    def on_train_batch_end(self, *args: Any) -> None:
        self.warm = True


PLACES = {
    kind.__name__: kind
    for kind in (InArrays, OnTrainer, OnCallback, OnData, ForLater, OnFunction, InLongLists, UnderNewKeys)
}
REFUSED = {"UnderKeyOfLoss": UnderKeyOfLoss}


def kept_there(info: RankInfo, layout: Layout | None, name: str, arguments: Mapping[str, Any]) -> Any:
    """What every rank has kept in the end, and the weights."""
    trainer, module = trainer_for(info, layout, arguments, max_epochs=1), {**PLACES, **REFUSED}[name]()
    trainer.fit(module, datamodule=Levels(module) if name in ("OnData", "ForLater") else None)
    weights = module.state_dict() if layout is None else trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    return {
        "kept": module.found(),
        "weights": {} if info.rank else {key: each.clone() for key, each in weights.items()},
    }
