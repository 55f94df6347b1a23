"""Finds the checkpoint of ``ckpt_path="last"``: the newest that is whole, by its completion marker.

Lightning finds what ``ModelCheckpoint(save_last=True)`` has saved under a name of its own, and begins anew without one.
So it is here: other checkpoints alone are no run to resume. Where there is such a run, a newer checkpoint is taken
whatever its name, and an older one instead of one that is damaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoints.files.directory import MARKER, newest_complete, newest_of
from lightning_megatron.checkpoints.files.folder import Folder

ON_SIGNAL = "preempted.ckpt"  # what is saved when a signal ends a run
_ON_REQUEUE = "hpc_ckpt_"  # what Lightning calls its checkpoint when SLURM is about to end a job


def newest_checkpoint(
    lightnings: Iterable[str], folder: Any, extension: str, root: Any, *, saves_last: bool
) -> set[str]:
    """The newest complete checkpoint, and those of Lightning's answer that are files.

    Args:
        lightnings: checkpoints that Lightning would choose from.
        folder: where a ModelCheckpoint saves.
        extension: of its checkpoints' names.
        root: the Trainer's folder, where SLURM's signal makes Lightning save.
        saves_last: whether that ModelCheckpoint saves for such a question.

    Returns:
        Paths to choose from, each of which can be asked when it was changed: see :func:`askable`.
    """
    found, on_signal = list(lightnings), f"{folder}/{ON_SIGNAL}"
    files = {path for path in (*found, on_signal) if Path(path).is_file()}
    requeued = newest_complete(root, extension, _ON_REQUEUE)
    if not (saves_last or found or requeued is not None or Folder(on_signal).exists()):
        return set()
    newest = newest_of([newest_complete(folder, extension), requeued])
    return files if newest is None else {*files, askable(newest)}


def askable(path: str) -> str:
    """A path whose modification time Lightning can read: the checkpoint, or its marker where folders have no times."""
    return path if Folder(path).is_local else f"{path}/{MARKER}"


def answered(path: Any) -> Any:
    """The checkpoint that :func:`askable` gave a name for."""
    return path.removesuffix(f"/{MARKER}") if isinstance(path, str) else path
