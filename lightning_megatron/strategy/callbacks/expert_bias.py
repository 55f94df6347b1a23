"""Balances experts by biases, from what the tokens of all replicas, stages' micro-batches and batches have chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron.experts.balance.bias import bias_of, move_bias
from lightning_megatron.experts.balance.load import ExpertCounts
from lightning_megatron.experts.routers import mixtures_of
from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.callbacks.expert_load import LOAD, ExpertLoad, check_counts, load_of_all
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of

BIAS = "ExpertBias (`expert_balance='bias'`)"


class ExpertBias(Callback):
    """Moves the biases with which mixtures choose experts, once after each update of the weights.

    Counted are the choices of all batches whose gradients went into the update, over all ranks, so biases are those of
    one process in any layout. Found are :class:`~lightning_megatron.layers.MoE` with ``biased=True``, and Hugging
    Face's ``e_score_correction_bias`` (DeepSeek-V3, GLM-4-MoE, dots.llm1, Ernie 4.5, ...) and ``expert_bias``
    (LFM2-MoE), which their own code never moves. ``MegatronStrategy(expert_balance="bias")`` adds this callback; it
    works without that strategy too, in one process.

    Args:
        rate: length of a step; 0.001 in DeepSeek-V3's training, 0 to leave them as they are.

    Raises:
        ValueError: ``rate`` is below 0.

    Example:
        ``Trainer(strategy=MegatronStrategy(expert_parallel_size=4), callbacks=[ExpertBias(0.001)])``
    """

    def __init__(self, rate: float = 0.001) -> None:
        if not rate >= 0:
            raise ValueError(f"`rate={rate}` must be at least 0.")
        self._rate = rate
        self._counts: ExpertCounts | None = None
        self._counting = False
        self._step = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse other strategies of several processes, and options under which a rank does not see whole rows.

        Raises:
            MisconfigurationException: with the option.
        """
        if getattr(trainer.strategy, "options", None) is not None or trainer.world_size > 1:
            check_counts(trainer, BIAS)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Follow the experts of the module.

        Raises:
            MisconfigurationException: no mixture has a bias.
        """
        run: Any = getattr(trainer.strategy, "run", None)
        module, tries = (pl_module, None) if run is None else (run.module, run.assembled.streams)
        mesh: Any = getattr(trainer.strategy, "mesh", None)
        self._counts = ExpertCounts(
            module,
            lambda: self._counting and (tries is None or not tries.tries),
            counts_whole=mesh is None or mesh.coordinates.context == 0,
        )
        self._biases = {mixture.path: bias_of(mixture) for mixture in mixtures_of(module) if not mixture.all_rows}
        self._biases = {path: bias for path, bias in self._biases.items() if bias is not None}
        self._step = trainer.global_step
        has = bool(self._biases)
        if run is not None:
            has = any(objects.gather(has, trainer.strategy.mesh.group("world")))  # type: ignore[attr-defined]
        if not has:
            raise MisconfigurationException(
                "ExpertBias (`expert_balance='bias'`) found no mixture of experts that is chosen with a bias; use "
                "`lightning_megatron.layers.MoE(..., biased=True)`, or leave it out."
            )

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count from here."""
        self._counting = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the biases, if the weights were updated; collective over the world."""
        self._counting = False
        if self._counts is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        for name, rows in load_of_all(self._counts, trainer.strategy).items():
            bias = self._biases.get(name)
            if bias is not None:
                move_bias(bias, rows, self._rate)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the hooks off."""
        if self._counts is not None:
            self._counts.close()
            self._counts = None


def counts_rows(callbacks: Iterable[Callback]) -> bool:
    """Whether one of ``callbacks`` counts the rows of experts, which it does under some options only."""
    return any(isinstance(callback, ExpertLoad | ExpertBias) for callback in callbacks)


def insert_expert_callbacks(trainer: pl.Trainer, *, load: bool, rate: float | None) -> None:
    """Add what logs the load of experts, and what balances them by biases, where they are wanted; once.

    Raises:
        MisconfigurationException: an option under which rows are not counted.
    """
    callbacks = callbacks_of(trainer)
    if load and not any(isinstance(callback, ExpertLoad) for callback in callbacks):
        check_counts(trainer, LOAD)
        callbacks.append(ExpertLoad())
    if rate is not None and not any(isinstance(callback, ExpertBias) for callback in callbacks):
        check_counts(trainer, BIAS)
        callbacks.append(ExpertBias(rate))
