"""Runs that are told to stop."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_megatron.checkpoints.files.directory import newest_complete
from tests.checkpoints.reshard_scenarios import Grid, Losses, Tied
from tests.harness import RankInfo, ReusedProcesses
from tests.parity.train import make_trainer


class Told(Tied):
    """Gets a signal in the middle of a step, on one rank."""

    def __init__(self, number: int, here: bool) -> None:
        super().__init__(seed=3)
        self.number, self.here = number, here

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.here and self.trainer.global_step in {3}:  # in no trial
            self.here = False
            os.kill(os.getpid(), self.number)
        return super().training_step(batch, batch_idx)


def _trainer(info: RankInfo, grid: Grid, callbacks: list[Callback], environment: Any) -> Trainer:
    options: dict[str, Any] = {"enable_checkpointing": True, "use_distributed_sampler": True}
    return make_trainer(info, grid.strategy(), max_steps=7, callbacks=callbacks, plugins=[environment], **options)


def told_to_stop(info: RankInfo, grid: Grid, rank: int, folder: str, on_exception: bool) -> list[Any]:
    """Whether the signal ended the run, the newest checkpoint, and the losses of both runs together."""
    losses, saves = Losses(), ModelCheckpoint(folder, save_on_exception=on_exception)
    module: LightningModule = Told(int(signal.SIGTERM), info.rank == rank)
    ended = False
    try:
        _trainer(info, grid, [losses, saves], ReusedProcesses(info)).fit(module)
    except SystemExit as error:
        ended = isinstance(error, SIGTERMException)
    warnings.filterwarnings("ignore", message=".*there is no last checkpoint")
    newest = newest_complete(folder)
    rest, saves = Losses(), ModelCheckpoint(folder, save_on_exception=on_exception)
    _trainer(info, grid, [rest, saves], ReusedProcesses(info)).fit(Tied(seed=4), ckpt_path="last")
    return [ended, Path(newest or "").name, losses.values, rest.values]


class Requeued(ReusedProcesses, SLURMEnvironment):
    """SLURM's rules for signals on the harness's processes."""

    def __init__(self, info: RankInfo) -> None:
        ReusedProcesses.__init__(self, info)
        self.auto_requeue, self.requeue_signal = True, signal.SIGUSR2  # the harness has another use for SIGUSR1


def told_to_requeue(info: RankInfo, grid: Grid, rank: int) -> list[Any]:
    """SLURM's signal on one rank: a checkpoint between two steps, on all; training goes on until SLURM ends it."""
    os.environ["SLURM_JOB_ID"] = "7"
    losses = Losses()
    trainer = _trainer(info, grid, [losses], Requeued(info))
    trainer.fit(Told(int(signal.SIGUSR2), info.rank == rank))
    del os.environ["SLURM_JOB_ID"]
    rest = Losses()
    path = newest_complete(info.directory)
    warnings.filterwarnings("ignore", message="The dirpath has changed")
    saves = ModelCheckpoint(f"{info.directory}/saves")
    _trainer(info, grid, [rest, saves], ReusedProcesses(info)).fit(Tied(seed=4), ckpt_path="last")
    return [Path(path or "").name, losses.values, rest.values]
