"""A folder on a mounted file system, or on any file system of fsspec.

The two differ in how a file becomes durable, and in whether a folder can be renamed atomically. This module hides the
first, and callers ask :attr:`Folder.is_local` for the second.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Folder:
    """A folder by path or URL.

    Args:
        path: ``/runs/a``, ``file:///runs/a``, ``memory://a``, ``s3://bucket/a``, ...
        storage_options: options of the fsspec file system.

    Attributes:
        fs: the fsspec file system.
        path: path in it, without the protocol.
        is_local: whether it is a mounted file system.
    """

    def __init__(self, path: Any, storage_options: dict[str, Any] | None = None) -> None:
        self._options = dict(storage_options or {})
        self.fs, found = fsspec.core.url_to_fs(os.fspath(path), **self._options)
        self.path: str = found.rstrip("/") or found
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def __str__(self) -> str:
        return self.path if self.is_local else self.fs.unstrip_protocol(self.path)

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition("/")[2]

    def child(self, name: str) -> Folder:
        """The folder ``name`` inside of this one; the folder itself for an empty name."""
        return self._at(f"{self.path}/{name}" if name else self.path)

    @property
    def parent(self) -> Folder:
        """The folder that contains this one."""
        return self._at(self.path.rpartition("/")[0])

    def sibling(self, name: str) -> Folder:
        """The folder ``name`` in the same parent."""
        return self.parent.child(name)

    def _at(self, path: str) -> Folder:
        other = object.__new__(Folder)
        other._options, other.fs, other.path, other.is_local = self._options, self.fs, path, self.is_local
        return other

    def open(self, name: str, mode: str) -> IO[bytes]:
        """Open a file for reading (``"rb"``) or writing (``"wb"``)."""
        where = f"{self.path}/{name}"
        return open(where, mode) if self.is_local else self.fs.open(where, mode)

    def read(self, name: str) -> bytes:
        """Read a small file in full."""
        with self.open(name, "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Write a small file and flush it to the disk."""
        with self.open(name, "wb") as file:
            file.write(data)
            self.flush(file)

    def flush(self, file: IO[bytes]) -> None:
        """Flush an open file to the disk (fsync); remote files are durable once closed."""
        file.flush()
        if self.is_local:
            os.fsync(file.fileno())

    def flush_names(self) -> None:
        """Flush the folder's own entries to the disk (fsync); does nothing on remote file systems."""
        if not self.is_local:
            return
        handle = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; ``None`` if it does not exist."""
        try:
            return int(self.fs.size(f"{self.path}/{name}"))
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        """Whether the folder contains a file or folder of that name."""
        return bool(self.fs.exists(f"{self.path}/{name}"))

    def exists(self) -> bool:
        """Whether anything is at this path."""
        return bool(self.fs.exists(self.path))

    def is_file(self) -> bool:
        """Whether a file is at this path."""
        return bool(self.fs.isfile(self.path))

    def is_link(self) -> bool:
        """Whether a symbolic link is at this path."""
        return self.is_local and Path(self.path).is_symlink()

    def age(self) -> float:
        """Seconds since an entry was last added to the folder or removed from it (local folders only)."""
        return time.time() - Path(self.path).stat().st_mtime

    def make(self) -> None:
        """Create the folder and its parents, if they do not exist."""
        self.fs.makedirs(self.path, exist_ok=True)

    def folders(self) -> list[Folder]:
        """The folders inside, sorted by name; empty if this one does not exist."""
        self.fs.invalidate_cache(self.path)
        if not self.fs.isdir(self.path):
            return []
        names = sorted(str(entry["name"]).rstrip("/") for entry in self.fs.ls(self.path, detail=True))
        return [self._at(name) for name in names if self.fs.isdir(name)]

    def rename_to(self, other: Folder) -> None:
        """Rename the folder atomically, on the same local file system."""
        Path(self.path).rename(other.path)
        other.parent.flush_names()

    def remove_file(self, name: str) -> None:
        """Delete a file inside, if it exists."""
        if self.has(name):
            self.fs.rm_file(f"{self.path}/{name}")

    def remove(self) -> None:
        """Delete the folder with its content, the symbolic link, or the file at this path, if there is one."""
        if self.is_local:
            path = Path(self.path)
            if path.is_symlink() or path.is_file():
                path.unlink()
            elif path.is_dir():
                shutil.rmtree(path)
        elif self.exists():
            self.fs.rm(self.path, recursive=True)
