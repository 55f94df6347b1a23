"""Hooks that judge what a step has returned, or the batch before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.tasks import TokenTask


class Judged(TokenTask):
    """Lowers the learning rate once the loss that a hook is given has risen, and keeps an average of it."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())
        self.average, self.lowest, self.lowered = 0.0, float("inf"), 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"].item()
        self.average = 0.9 * self.average + 0.1 * loss
        if loss > self.lowest:
            self.lowered += 1
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
        self.lowest = min(self.lowest, loss)


class Losses(Callback):
    """Those that a callback is given."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


class LeavesEarly(TokenTask):
    """Leaves an epoch by its number, and by that of the batch."""

    def __init__(self) -> None:
        super().__init__(LearnedPositions())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 2 else None


class LeavesByBatch(LeavesEarly):
    """Does so by what is in a batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if self.current_epoch and batch[0].double().mean() < self.all_gather(batch[0].double().mean()).mean():
            return -1
        return None


class LeavesByAll(LeavesEarly):
    """Does so by what is in the batches of all replicas."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:  # type: ignore[override]
        return -1 if batch_idx and self.all_gather(batch[0].double().mean()).mean() < 6.0 else None  # type: ignore[union-attr]


LEAVING = {kind.__name__: kind for kind in (LeavesEarly, LeavesByBatch, LeavesByAll)}


def left(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], name: str) -> Any:
    """Losses of three epochs, some of which end early."""
    torch.manual_seed(7)
    losses = Losses()
    trainer = trainer_for(info, layout, arguments, max_epochs=3, limit_val_batches=0, callbacks=[losses])
    trainer.fit(LEAVING[name]())
    return [losses.seen, trainer.global_step]


def judged(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """What hooks were given and made of it."""
    torch.manual_seed(7)
    losses, module = Losses(), Judged()
    trainer = trainer_for(info, layout, arguments, max_epochs=2, limit_val_batches=0, callbacks=[losses], **options)
    trainer.fit(module)
    return [losses.seen, module.average, module.lowered, trainer.optimizers[0].param_groups[0]["lr"]]
