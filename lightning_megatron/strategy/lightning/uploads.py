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
from lightning_megatron.mesh.replaced import Replacements

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
    with Replacements() as replaced:
        for logger in trainer.loggers:
            if isinstance(logger, (MLFlowLogger, WandbLogger)):
                replaced.call(logger, _UPLOAD, functools.partial(_upload, getattr(logger, _UPLOAD), wait))
        yield


def _upload(lightnings: Callable[..., None], wait: Callable[[], None], checkpoint_callback: Any) -> None:
    wait()
    with Replacements() as replaced:
        replaced.put(utilities, "Path", _CheckpointPath)
        artifact = getattr(sys.modules.get("wandb"), "Artifact", None)
        if artifact is not None:
            replaced.put(artifact, "add_file", _adding_directories(artifact.add_file))
        lightnings(checkpoint_callback)


class _CheckpointPath(type(Path())):  # type: ignore[misc]
    """A path of which a complete checkpoint directory is a file."""

    def is_file(self) -> bool:
        """Whether there is something to upload."""
        return super().is_file() or os.path.isfile(os.path.join(self, MARKER))


def _adding_directories(add_file: Callable[..., Any]) -> Callable[..., Any]:
    """``wandb.Artifact.add_file`` that takes directories, which W&B wants to be added by another method."""

    def add(self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        if not os.path.isdir(local_path):
            return add_file(self, local_path, *args, **kwargs)
        return self.add_dir(local_path, name=kwargs.get("name", args[0] if args else None))

    return add
