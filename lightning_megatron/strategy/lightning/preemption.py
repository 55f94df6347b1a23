"""A notice to stop reaches every rank at the same step, and ends with a whole checkpoint.

Signals arrive at different moments on different ranks, some in the middle of a pipeline. Saving needs all ranks, so a
handler only takes note; at the start of the next batch the ranks agree, which costs what Lightning's own question at
that place does::

    rank 0   step 7 ──────────── │ agree: stop │ checkpoint of step 7, end
    rank 1   step 7 ── SIGTERM ─ │ agree: stop │ checkpoint of step 7, end
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_megatron.mesh.messages.collectives import world_maximum

_NAME = "preempted.ckpt"


class Preemption:
    """Takes note of signals, and acts on them where all ranks stand at the same place.

    Args:
        trainer: is about to fit.
        device: of the message that the ranks agree by.
    """

    def __init__(self, trainer: pl.Trainer, device: torch.device) -> None:
        self._trainer = trainer
        self._device = device
        self._stop = False
        self._requeue = False
        self._requeue_now: Callable[[], None] | None = None

    def install(self) -> None:
        """Take Lightning's place for SIGTERM, and for SLURM's signal where Lightning listens to it.

        Lightning puts back, when the fit ends, what was there before it.
        """
        epoch_loop = self._trainer.fit_loop.epoch_loop
        epoch_loop._broadcast_sigterm_tensor = self.agree  # type: ignore[method-assign]
        if threading.current_thread() is not threading.main_thread():
            return
        environment = self._trainer._accelerator_connector.cluster_environment
        requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        if requeues:
            assert isinstance(environment, SLURMEnvironment) and environment.requeue_signal is not None
            number = environment.requeue_signal
            connector = self._trainer._signal_connector
            self._requeue_now = lambda: connector._slurm_sigusr_handler_fn(number, None)  # type: ignore[arg-type]
            signal.signal(number, self._note_requeue)
        if not requeues:  # under SLURM with requeuing, SIGTERM comes with the other signal and is passed over
            signal.signal(signal.SIGTERM, self._note_stop)

    def remove(self) -> None:
        """Give Lightning's loop its own question back; the signals' handlers Lightning puts back itself."""
        self._trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    def _note_stop(self, number: int, frame: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._stop and launcher is not None:
            launcher.kill(signal.Signals(number))
        self._stop = True

    def _note_requeue(self, number: int, frame: FrameType | None) -> None:
        self._requeue = True

    def agree(self) -> None:
        """Act on a signal that any rank has got; collective over all ranks.

        Before the first batch of an epoch, and while gradients are being accumulated, the next batch is awaited: a
        checkpoint holds no gradients and no order that has been drawn but not been followed yet.

        Raises:
            SIGTERMException: on every rank, if one was told to stop.
        """
        batches = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if batches == 0 or batches % self._trainer.accumulate_grad_batches:
            return
        notes = torch.tensor([int(self._stop), int(self._requeue)], device=self._device)
        stop, requeue = world_maximum(notes).tolist()
        if requeue:
            self._requeue = False
            if self._requeue_now is not None:
                with self._in_the_foreground():  # SLURM ends the job as soon as it is back in the queue
                    self._requeue_now()
        if stop:
            self._stop = False
            self._save()
            raise SIGTERMException

    @contextmanager
    def _in_the_foreground(self) -> Iterator[None]:
        io = self._trainer.strategy.checkpoint_io
        background = getattr(io, "async_save", False)
        if background:
            io.async_save = False  # type: ignore[attr-defined]
        try:
            yield
        finally:
            if background:
                io.async_save = True  # type: ignore[attr-defined]

    def _save(self) -> None:
        """Save where ModelCheckpoint saves, unless a callback is going to."""
        trainer = self._trainer
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(c, OnExceptionCheckpoint) or getattr(c, "save_on_exception", False) for c in callbacks):
            return
        saver = next((c for c in callbacks if isinstance(c, ModelCheckpoint)), None)
        if saver is not None and saver.dirpath is not None and trainer.global_step:
            trainer.save_checkpoint(os.path.join(saver.dirpath, _NAME), weights_only=False)


def listen(trainer: pl.Trainer, device: torch.device) -> Preemption:
    """Install a :class:`Preemption` for this fit."""
    preemption = Preemption(trainer, device)
    preemption.install()
    return preemption
