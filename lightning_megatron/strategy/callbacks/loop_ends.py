"""Says when loops over batches end, so that ranks with different numbers of batches are told apart from slow ones.

Comes first among the callbacks: nothing may be exchanged between the end of a loop and the question whether it has
ended everywhere. Validation inside of a fit can begin before the training epoch's own end is announced; where its last
batch is done, the epoch has ended there already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from lightning_megatron.mesh.watch.turns import TRAINING
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of


class LoopEnds(Callback):
    """Waits at the end of each loop until it has ended on all ranks.

    Args:
        end_loop: takes the kind of loop, and the number of its batches where this rank knows it better.
        predicts: whether ranks exchange something in predictions, too.
    """

    def __init__(self, end_loop: Callable[..., None], *, predicts: bool = False) -> None:
        self._end_loop, self._predicts = end_loop, predicts
        self._ended = -1

    def __reduce__(self) -> Any:
        """Without the processes of this run: copies of it end no loop."""
        return LoopEnds, (end_nothing,)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The epoch's batches are done."""
        self._end_training(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The epoch's batches may be done."""
        fits = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fits and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._end_training(trainer)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All validation batches are done."""
        self._end_loop("validation")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All test batches are done."""
        self._end_loop("test")

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All batches of predictions are done."""
        if self._predicts:
            self._end_loop("predict")

    def _end_training(self, trainer: pl.Trainer) -> None:
        if self._ended != trainer.current_epoch:
            self._ended = trainer.current_epoch
            self._end_loop(TRAINING, trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def end_nothing(*args: Any) -> None:
    """Stands for what waits for other ranks, in copies of a Trainer that were made while a run went on."""


def insert_loop_ends(trainer: pl.Trainer, end_loop: Callable[..., None], *, predicts: bool) -> None:
    """Put the callback in front, for one run."""
    callbacks_of(trainer).insert(0, LoopEnds(end_loop, predicts=predicts))


def remove_loop_ends(trainer: pl.Trainer) -> None:
    """Take it out again."""
    callbacks = callbacks_of(trainer)
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, LoopEnds)]
