"""Modules that write into their weights between or in steps, alike on all replicas or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.tasks import TokenTask


class Writing(TokenTask):
    """Writes nothing."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())

    @property
    def weight(self) -> Tensor:
        """What the others write into."""
        return self.net.final_norm.weight


class OfBatch(Writing):
    """Its hook scales a weight by the tokens of a replica's own batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weight.data.mul_(1 + 1e-3 * self.number(batch[0].double().mean()))

    def number(self, own: Tensor) -> Tensor:
        """What is written."""
        return own


class OfAll(OfBatch):
    """Does so by the tokens of all batches."""

    def number(self, own: Tensor) -> Tensor:
        return self.all_gather(own).mean()  # type: ignore[union-attr]


class FirstRank(Writing):
    """Writes on global rank 0 only, where an epoch begins."""

    def on_train_epoch_start(self) -> None:
        if self.trainer.is_global_zero:
            self.weight.data.mul_(1.01)


class InStep(Writing):
    """Its step writes a sum of its own tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.weight.data.mul_(1 + 1e-3 * batch[0].double().mean())
        return loss


class Noisy(Writing):
    """Adds noise, drawn by generators that all ranks have seeded alike."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weight.data.add_(1e-3 * torch.randn_like(self.weight))


class Gone(Writing):
    """A weight is no number any more, on every replica alike."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weight.data.fill_(float("nan"))


KINDS: dict[str, type[Writing]] = {kind.__name__: kind for kind in (OfBatch, OfAll, FirstRank, InStep, Noisy, Gone)}


def run(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> Tensor:
    """The weight after an epoch."""
    torch.manual_seed(7)
    trainer = trainer_for(info, layout, arguments, max_epochs=1, limit_val_batches=0)
    module = KINDS[kind]()
    trainer.fit(module)
    state = trainer.strategy.full_state_dict() if layout is not None else module.state_dict()  # type: ignore[attr-defined]
    return state.get("net.final_norm.weight", torch.zeros(0)).double().clone()
