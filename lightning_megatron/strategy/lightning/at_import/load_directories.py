"""Lets Lightning read our checkpoint directories where it reads checkpoint files, also where there is no Trainer.

``Module.load_from_checkpoint(DIRECTORY)`` and the command line (``test --ckpt_path DIRECTORY``, which takes
hyperparameters from it) each call a function that opens a file; Lightning offers no way to add a format. That
function is replaced once, when Lightning is imported, and until :func:`forget`: there is no run at whose end it could
be given back. What is not a directory goes to Lightning as before.

``--trainer.strategy=MegatronStrategy`` is looked for among the strategies that have been imported, so the strategy is
imported along with the command line.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_megatron.mesh.replaced import Replacements

_SAVING = "lightning.pytorch.core.saving"
_CLI, _METHOD, _KEY = "lightning.pytorch.cli", "_parse_ckpt_path", "hyper_parameters"
_TAUGHT = Replacements()


def read_directories() -> None:
    """Wrap Lightning's reader, if it has been imported and is not wrapped yet."""
    saving: Any = sys.modules.get(_SAVING)
    reader = getattr(saving, "pl_load", None)
    if reader is not None and not isinstance(reader, _LoadsDirectories):
        _TAUGHT.put(saving, "pl_load", _LoadsDirectories(reader))


class _LoadsDirectories:
    """Stands for ``lightning.pytorch.core.saving.pl_load``."""

    def __init__(self, lightnings: Callable[..., Any]) -> None:
        self._lightnings = lightnings

    def __call__(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and os.path.isdir(path):
            from lightning_megatron.checkpoints.files.sources import load_whole

            return load_whole(path, trust=kwargs.get("weights_only") is False)
        return self._lightnings(path, *args, **kwargs)


def teach_command_line() -> None:
    """Wrap the method of Lightning's command line, if it has been imported, once; import the strategy.

    Raises:
        AttributeError: this version of Lightning has no such method.
    """
    command_line: Any = sys.modules.get(_CLI)
    if command_line is None:
        return
    importlib.import_module("lightning_megatron.strategy.strategy")
    method = getattr(command_line.LightningCLI, _METHOD)
    if not hasattr(method, "reads_directories"):
        _TAUGHT.put(command_line.LightningCLI, _METHOD, _reading_directories(method))


def forget() -> None:
    """Let Lightning read what it read before this package was imported."""
    _TAUGHT.take_back()


def _reading_directories(lightnings: Callable[[Any], None]) -> Callable[[Any], None]:
    def parse(self: Any) -> None:
        options = self.config.get(self.config.get("subcommand") or "") or {}
        path = options.get("ckpt_path")
        if not isinstance(path, (str, os.PathLike)) or not os.path.isdir(path):
            return lightnings(self)
        with _hyperparameters(path) as file:
            options["ckpt_path"] = file
            lightnings(self)
        self.config[self.config["subcommand"]]["ckpt_path"] = path
        return None

    parse.reads_directories = True  # type: ignore[attr-defined]
    return parse


@contextmanager
def _hyperparameters(path: Any) -> Iterator[str]:
    """A file with the hyperparameters of a checkpoint directory, as long as the context lasts."""
    import torch

    from lightning_megatron.checkpoints.files.directory import META, open_checkpoint
    from lightning_megatron.checkpoints.files.sources import load_plain

    data = open_checkpoint(path)
    meta = load_plain(data.read(META), f"{data}/{META}", trust=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hyperparameters.ckpt"
        torch.save({_KEY: dict(meta.get(_KEY, {}))}, file)
        yield str(file)
