"""Which checkpoint ``ckpt_path="last"`` means: the newest that is whole, by its completion marker."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoints.files.directory import MARKER, newest_complete, newest_of
from lightning_megatron.checkpoints.files.folder import Folder

_ON_REQUEUE = "hpc_ckpt_"  # what Lightning calls its checkpoint when SLURM is about to end a job


def newest_checkpoint(lightnings: Iterable[str], folder: Any, extension: str, root: Any) -> set[str]:
    """The newest complete checkpoint; without one, those of Lightning's answer that are files.

    Args:
        lightnings: checkpoints that Lightning would choose from.
        folder: where a ModelCheckpoint saves.
        extension: of its checkpoints' names.
        root: the Trainer's folder, where SLURM's signal makes Lightning save.

    Returns:
        Paths to choose from, each of which can be asked when it was changed: see :func:`askable`.
    """
    places = [(folder, ""), (root, _ON_REQUEUE)]
    newest = newest_of(newest_complete(place, extension, prefix) for place, prefix in places)
    return {path for path in lightnings if Path(path).is_file()} if newest is None else {askable(newest)}


def askable(path: str) -> str:
    """A path whose modification time Lightning can read: the checkpoint, or its marker where folders have no times."""
    return path if Folder(path).is_local else f"{path}/{MARKER}"


def answered(path: Any) -> Any:
    """The checkpoint that :func:`askable` gave a name for."""
    return path.removesuffix(f"/{MARKER}") if isinstance(path, str) else path
