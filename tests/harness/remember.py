"""Results that tests share, whichever of pytest's processes makes them first: one-process references above all."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "TESTS_REMEMBERED"  # environment variable: where the results of this test session lie


def open_folder() -> Callable[[], None]:
    """Makes the folder of a test session; returns what removes it."""
    folder = tempfile.mkdtemp(prefix="remembered-")
    os.environ[FOLDER] = folder
    return functools.partial(shutil.rmtree, folder, ignore_errors=True)


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """``functools.cache`` for all processes of a test session; arguments are told apart by their ``repr``.

    Whoever asks while another process makes the result waits for it. Callers get a copy each and may change it.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        folder = os.environ.get(FOLDER)
        if folder is None:  # a script, not a test session
            return function(*args)
        named = [f"{arg.__module__}.{arg.__qualname__}" if callable(arg) else repr(arg) for arg in args]
        key = hashlib.sha256(repr((function.__module__, function.__qualname__, named)).encode()).hexdigest()
        with (Path(folder) / key).open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if data := file.read():
                return pickle.loads(data)
            result = function(*args)
            file.write(pickle.dumps(result))
            return result

    return call
