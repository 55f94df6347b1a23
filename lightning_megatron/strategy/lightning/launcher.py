"""Starts the processes of a node, and answers ``ckpt_path="last"`` from completion markers for the time of a launch.

Lightning asks each ModelCheckpoint for files called ``last*`` and takes the one changed last. After a crash that can be
an older one than ``step=40.ckpt`` beside it, or one that was not finished. So while a function of the Trainer runs
under this launcher, which only our strategy has, its ModelCheckpoints answer from the markers instead, and what was
saved on SLURM's signal counts too. Other Trainers' callbacks are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lightning_megatron.strategy.lightning.trainer_access import callbacks_of
from lightning_megatron.strategy.saving.newest import newest_checkpoint

_QUESTION = "_find_last_checkpoints"


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher of one process per device; arguments as there."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other processes of this node, then call ``function``."""
        if trainer is None:
            return super().launch(function, *args, **kwargs)
        with answers_from_markers(trainer):
            return super().launch(function, *args, trainer=trainer, **kwargs)


@contextmanager
def answers_from_markers(trainer: pl.Trainer) -> Iterator[None]:
    """Let the ModelCheckpoints of ``trainer`` find the newest checkpoint that is whole.

    Raises:
        AttributeError: this version of Lightning asks ModelCheckpoint by another name.
    """
    asked = [callback for callback in callbacks_of(trainer) if isinstance(callback, ModelCheckpoint)]
    for callback in asked:
        callback.__dict__[_QUESTION] = _Search(callback, getattr(callback, _QUESTION))
    try:
        yield
    finally:
        for callback in asked:
            callback.__dict__.pop(_QUESTION, None)


class _Search:
    """Stands for ``ModelCheckpoint._find_last_checkpoints`` of one callback."""

    def __init__(self, callback: ModelCheckpoint, lightnings: Callable[..., set[str]]) -> None:
        self._callback, self._lightnings = callback, lightnings

    def __call__(self, trainer: pl.Trainer) -> set[str]:
        folder = self._callback._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
        found = self._lightnings(trainer)
        return newest_checkpoint(found, folder, self._callback.FILE_EXTENSION, trainer.default_root_dir)
