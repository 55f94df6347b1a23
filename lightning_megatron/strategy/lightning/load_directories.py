"""``Module.load_from_checkpoint(DIRECTORY)``: Lightning's reader of checkpoint files reads our directories as well.

Lightning offers no way to add a format: ``load_from_checkpoint`` calls a function of its module, which opens a file.
That function is wrapped once, when Lightning is imported, and stays so: the call needs no Trainer and no strategy, so
there is no run at whose end it could be given back. What is not a directory goes to Lightning as before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

_SAVING = "lightning.pytorch.core.saving"


def read_directories() -> None:
    """Wrap Lightning's reader, if it has been imported and is not wrapped yet."""
    saving: Any = sys.modules.get(_SAVING)
    reader = getattr(saving, "pl_load", None)
    if reader is not None and not isinstance(reader, _LoadsDirectories):
        saving.pl_load = _LoadsDirectories(reader)


class _LoadsDirectories:
    """Stands for ``lightning.pytorch.core.saving.pl_load``."""

    def __init__(self, lightnings: Callable[..., Any]) -> None:
        self._lightnings = lightnings

    def __call__(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and os.path.isdir(path):
            from lightning_megatron.checkpoints.files.sources import load_whole

            return load_whole(path, trust=kwargs.get("weights_only") is False)
        return self._lightnings(path, *args, **kwargs)
