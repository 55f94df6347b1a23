"""The environment of processes that a test launches by itself, and which import everything anew."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def environment(**others: str) -> dict[str, str]:
    """That of this process, with the repository on the path, one thread, and without the extras (`sitecustomize`)."""
    path = os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **others}
