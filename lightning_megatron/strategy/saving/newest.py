"""``ckpt_path="last"`` finds the newest checkpoint that is whole.

Lightning asks each ModelCheckpoint for files called ``last*`` and takes the one changed last. After a crash that can be
an older one than ``step=40.ckpt`` beside it, or one that was not finished. Where our strategy is in use, the question
is answered from the markers instead, and what was saved on SLURM's signal counts too; under any other strategy,
Lightning's answer stands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron.checkpoints.files.directory import MARKER, newest_complete, newest_of
from lightning_megatron.checkpoints.files.folder import Folder

_ON_REQUEUE = "hpc_ckpt_"  # what Lightning calls its checkpoint when SLURM is about to end a job
_QUESTION = "_find_last_checkpoints"


def answer_from_markers(strategy_type: type) -> None:
    """Let ModelCheckpoint's search for the last checkpoint look at markers under strategies of ``strategy_type``."""
    lightnings = getattr(ModelCheckpoint, _QUESTION)
    if not isinstance(lightnings, _Search):
        setattr(ModelCheckpoint, _QUESTION, _Search(lightnings, strategy_type))


class _Search:
    """The method, with Lightning's own inside."""

    def __init__(self, lightnings: Callable[..., set[str]], strategy_type: type) -> None:
        self._lightnings = lightnings
        self._strategy_type = strategy_type

    def __get__(self, callback: Any, owner: type) -> Any:
        return self if callback is None else functools.partial(self, callback)

    def __call__(self, callback: ModelCheckpoint, trainer: Any) -> set[str]:
        found = self._lightnings(callback, trainer)
        if not isinstance(trainer.strategy, self._strategy_type):
            return found
        folder = callback._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
        places = [(folder, ""), (trainer.default_root_dir, _ON_REQUEUE)]
        newest = newest_of(newest_complete(place, callback.FILE_EXTENSION, prefix) for place, prefix in places)
        files = {path for path in found if Path(path).is_file()}
        return files if newest is None else {askable(newest)}


def askable(path: str) -> str:
    """What stands for a checkpoint where Lightning asks when it was changed: remote folders cannot tell, files can."""
    return path if Folder(path).is_local else f"{path}/{MARKER}"


def answered(path: Any) -> Any:
    """The checkpoint that :func:`askable` gave a name for."""
    return path.removesuffix(f"/{MARKER}") if isinstance(path, str) else path
