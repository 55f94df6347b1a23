"""A notice to stop reaches every rank at the same step, and ends with a whole checkpoint.

Signals arrive at different moments on different ranks, some in the middle of a pipeline. Saving needs all ranks, so a
handler only takes note; at the start of the next batch the ranks agree, which costs what Lightning's own question at
that place does::

    rank 0   step 7 ──────────── │ agree: stop │ checkpoint of step 7, end
    rank 1   step 7 ── SIGTERM ─ │ agree: stop │ checkpoint of step 7, end

Ctrl-C in a terminal is such a notice, and reaches every rank by itself. One that is repeated, or comes outside of the
training steps, ends the run at once. Either way the process then ends without a last search for unreachable objects,
which takes each rank many seconds where torch and its libraries are loaded and the ranks share processors.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_megatron.mesh.messages.collectives import world_maximum
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.mesh.watch.turns import TRAINING
from lightning_megatron.strategy.lightning.launcher import INTERRUPTED, TERMINATED
from lightning_megatron.strategy.saving.newest import ON_SIGNAL

_QUESTION = "_broadcast_sigterm_tensor"
_ONE_PRESS_S = 0.5
_SLOW_S = 5.0


class Preemption:
    """Takes note of signals, and acts on them where all ranks stand at the same place.

    Args:
        trainer: is about to fit.
        device: of the message that the ranks agree by.
        wants_batch: is told the kind of loop, the number of the next batch and how many there are.
        naming_failures: around a message that fails where another rank has failed.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        device: torch.device,
        wants_batch: Callable[..., None],
        naming_failures: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._trainer = trainer
        self._device = device
        self._wants_batch, self._naming_failures = wants_batch, naming_failures
        self._replaced = Replacements()
        self._stop = False
        self._interrupted_at: float | None = None
        self._requeue = False
        self._requeue_now: Callable[[], None] | None = None

    def install(self) -> None:
        """Take Lightning's place for SIGTERM, and for SLURM's signal where Lightning listens to it.

        Lightning puts back, when the fit ends, what was there before it.
        """
        self._replaced.call(self._trainer.fit_loop.epoch_loop, _QUESTION, self.agree)
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
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note_interrupt)

    def remove(self) -> None:
        """Give Lightning's loop its own question back; the signals' handlers Lightning puts back itself."""
        self._replaced.take_back()

    def _note_stop(self, number: int, frame: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._stop and launcher is not None:
            launcher.kill(signal.Signals(number))
        self._stop = True

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        now, before = time.monotonic(), self._interrupted_at
        if before is not None and now - before < _ONE_PRESS_S:  # the same one, by way of another process
            return
        if before is not None or not self._trainer.training:
            if self._trainer.is_global_zero:
                _say('Stopped at once, without saving; resume with the newest checkpoint: `ckpt_path="last"`.')
            _end_quickly()
            raise KeyboardInterrupt
        self._interrupted_at = now
        if self._trainer.is_global_zero:
            timer = threading.Timer(_SLOW_S, self._ask_for_patience)
            timer.daemon = True
            timer.start()

    def _ask_for_patience(self) -> None:
        if self._interrupted_at is not None:
            _say("Saving after the step that is running; Ctrl-C again stops at once.")

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
        self._wants_batch(TRAINING, batches + 1, self._trainer.num_training_batches)
        if batches == 0 or batches % self._trainer.accumulate_grad_batches:
            return
        interrupted = self._interrupted_at is not None
        notes = torch.tensor([int(self._stop), int(self._requeue), int(interrupted)], device=self._device)
        with self._naming_failures():
            stop, requeue, interrupt = world_maximum(notes).tolist()
        if requeue:
            self._requeue = False
            if self._requeue_now is not None:
                with self._in_the_foreground():  # SLURM ends the job as soon as it is back in the queue
                    self._requeue_now()
        if stop or interrupt:
            with self._in_the_foreground():
                saved = self._save()
            self._stop, self._interrupted_at = False, None
            _end_quickly()
            if self._trainer.is_global_zero:
                _say(f"Stopped by {'SIGTERM' if stop else 'Ctrl-C'} after step {self._trainer.global_step}: {saved}")
            raise SIGTERMException(TERMINATED if stop else INTERRUPTED)

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

    def _save(self) -> str:
        """Save where ModelCheckpoint saves, unless a callback is going to; what was saved, in words."""
        trainer = self._trainer
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
                return f'{type(callback).__name__} saves; resume with its checkpoint, or `ckpt_path="last"`.'
        saver = next((c for c in callbacks if isinstance(c, ModelCheckpoint)), None)
        if saver is None or saver.dirpath is None:
            return "nothing was saved; a ModelCheckpoint among the Trainer's callbacks says where to."
        if not trainer.global_step:
            return "there was nothing to save yet."
        path = os.path.join(saver.dirpath, ON_SIGNAL)
        trainer.save_checkpoint(path, weights_only=False)
        return f'saved {path}; resume with `ckpt_path={path!r}`, or "last".'


def _end_quickly() -> None:
    """Let the interpreter, when it ends, pass over the objects that there are then instead of searching them."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def _say(message: str) -> None:
    print(f"\n{message}", file=sys.stderr, flush=True)


def listen(
    trainer: pl.Trainer,
    device: torch.device,
    wants_batch: Callable[..., None],
    naming_failures: Callable[[], AbstractContextManager[None]],
) -> Preemption:
    """Install a :class:`Preemption` for this fit; arguments as there."""
    preemption = Preemption(trainer, device, wants_batch, naming_failures)
    preemption.install()
    return preemption
