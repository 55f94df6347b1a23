"""Prepared data in a folder, built once: whole or not at all, and found again by what it was made of."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def cache_key(described: Any, files: Iterable[Path] = ()) -> str:
    """Name for a folder of prepared data: 16 hexadecimal digits.

    It changes with ``described``, and with the name, the size or the time of the last change of any of ``files``; their
    content is not read.

    Args:
        described: everything else that decides what comes out, as JSON has it.
        files: what the data is read from.
    """
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    text = json.dumps([described, stats], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_once(folder: Path, make: Callable[[Path, Path], None]) -> None:
    """Let ``make(scratch, result)`` fill the folder ``result``, which then becomes ``folder``, whole or not at all.

    The work is done in a temporary folder that is renamed at the end, so an interrupted run leaves no half result under
    the final name, and two nodes that share a file system cannot mix their files. A folder that is there already is
    left as it is. Call it in ``prepare_data``, which runs on one process; ``datasets.load_from_disk`` then maps the
    result into the memory of all of them.

    Args:
        folder: where the result belongs; its parents are made.
        make: fills the second folder; the first is for what is not kept.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as temporary:
        scratch, result = Path(temporary, "scratch"), Path(temporary, "result")
        make(scratch, result)
        _move_into_place(result, folder)


def _move_into_place(result: Path, folder: Path) -> None:
    """Rename ``result``; if another process was first, its equal folder stays and ours is dropped."""
    try:
        os.replace(result, folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(result)
