"""Checkpoint directories for loggers that upload checkpoints (``WandbLogger``, ``MLFlowLogger`` with ``log_model``).

Such a logger asks a ModelCheckpoint for its checkpoints and takes those that are files. For the time of a run, a
complete directory counts as one: MLflow uploads directories as it does files, and a W&B artifact gets the directory
under the name that the file would have, so that ``load_from_checkpoint(artifact_folder + "/model.ckpt")`` reads it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger, utilities

from lightning_megatron.checkpoints.files.directory import MARKER
from lightning_megatron.mesh.replaced import Replaced

_UPLOAD = "_scan_and_log_checkpoints"


@contextmanager
def uploads_directories(trainer: pl.Trainer, wait: Callable[[], None]) -> Iterator[None]:
    """Within, the loggers of a Trainer upload directories.

    Args:
        trainer: whose loggers they are.
        wait: for a save in the background, whose directory is not there before.

    Raises:
        AttributeError: this version of Lightning uploads by another method.
    """
    found = [logger for logger in trainer.loggers if isinstance(logger, (MLFlowLogger, WandbLogger))]
    for logger in found:
        upload = functools.partial(_upload, getattr(logger, _UPLOAD), wait)
        logger.__dict__[_UPLOAD] = Replaced(logger, _UPLOAD, upload)
    try:
        yield
    finally:
        for logger in found:
            logger.__dict__.pop(_UPLOAD, None)


def _upload(lightnings: Callable[..., None], wait: Callable[[], None], checkpoint_callback: Any) -> None:
    wait()
    with _instead(utilities, "Path", _CheckpointPath), _artifacts_of_directories():
        lightnings(checkpoint_callback)


class _CheckpointPath(type(Path())):  # type: ignore[misc]
    """A path of which a complete checkpoint directory is a file."""

    def is_file(self) -> bool:
        """Whether there is something to upload."""
        return super().is_file() or os.path.isfile(os.path.join(self, MARKER))


@contextmanager
def _instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``value`` in the place of an attribute."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _artifacts_of_directories() -> Iterator[None]:
    """Within, ``wandb.Artifact.add_file`` takes directories, which W&B wants to be added by another method."""
    artifact = getattr(sys.modules.get("wandb"), "Artifact", None)
    if artifact is None:
        yield
        return
    add_file = artifact.add_file

    def add(self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        if not os.path.isdir(local_path):
            return add_file(self, local_path, *args, **kwargs)
        return self.add_dir(local_path, name=kwargs.get("name", args[0] if args else None))

    with _instead(artifact, "add_file", add):
        yield
