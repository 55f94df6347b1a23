"""Saves one file in Lightning's format, whatever the layout, for programs that open a checkpoint with ``torch.load``.

The ranks write a directory first, each its own boxes. The first rank exports that to the file, one tensor in memory at
a time, and deletes it. So each save writes all bytes twice, the second time on one rank alone. Until the file has its
name, the directory is complete under a temporary one, where ``ckpt_path="last"`` finds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_megatron.checkpoints.files.directory import remove_checkpoint
from lightning_megatron.checkpoints.files.exporting import export_lightning
from lightning_megatron.checkpoints.files.folder import Folder
from lightning_megatron.checkpoints.files.sources import open_source


class SingleFile:
    """A file to be written.

    Args:
        path: of the file, on a mounted file system.
        storage_options: of the fsspec file system.
        token: a random name, equal on all ranks.

    Raises:
        ValueError: the path is not on a mounted file system.
    """

    def __init__(self, path: Any, storage_options: Any | None, token: str) -> None:
        self._target = Folder(path, storage_options)
        if not self._target.is_local:
            raise ValueError(
                f"`MegatronCheckpointIO(single_file=True)` writes to mounted file systems, and {self._target} is on "
                "another. Leave `single_file` out: directories are saved there too, and `lightning-megatron checkpoint "
                "export` makes a file of one."
            )
        self._directory = self._target.sibling(f".{self._target.name}.{token}.replaced")
        self._new = self._target.sibling(f".{self._target.name}.{token}.new")

    @property
    def directory(self) -> str:
        """Directory in which the ranks save."""
        return self._directory.path

    def write(self) -> Exception | None:
        """Write the directory as one file and delete the directory; returns the error if it failed."""
        try:
            export_lightning(open_source(self.directory, trust=True), Path(self._new.path))  # written just before
            with open(self._new.path, "rb") as file:
                self._new.flush(file)  # type: ignore[arg-type]
            if not self._target.is_file():
                remove_checkpoint(self._target.path)
            self._new.rename_to(self._target)
            self._directory.remove()
        except Exception as error:
            for left in (self._new.sibling(f".{self._new.name}.part"), self._new, self._directory):
                left.remove()
            return error
        return None
