"""Logs the norm of the gradients, which no rank could compute by itself."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_megatron.strategy.lightning.trainer_access import callbacks_of


class LogGradientNorm(Callback):
    """Logs the global norm, before clipping, as ``grad_norm``; for ``MegatronStrategy(log_gradient_norm=True)``."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Compute and log it; collective over all ranks."""
        strategy: Any = trainer.strategy
        pl_module.log("grad_norm", strategy.gradient_norm().float())


def insert_gradient_norm(trainer: pl.Trainer) -> None:
    """Add the callback, once."""
    callbacks = callbacks_of(trainer)
    if not any(isinstance(callback, LogGradientNorm) for callback in callbacks):
        callbacks.append(LogGradientNorm())
