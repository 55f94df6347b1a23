"""Saving a module that no run has divided yet: ``trainer.strategy.connect(module); trainer.save_checkpoint(path)``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_megatron.checkpoints.state.stored import aliases
from lightning_megatron.mesh.marks import is_marked
from lightning_megatron.strategy.saving.checkpoint_io import MegatronCheckpointIO
from lightning_megatron.strategy.saving.resume import about_module


def is_whole(module: pl.LightningModule | None) -> bool:
    """Whether there is a module, of which no earlier run has left a part."""
    return module is not None and not is_marked(module)


def save_before_run(
    module: pl.LightningModule,
    io: MegatronCheckpointIO,
    checkpoint: dict[str, Any],
    path: Any,
    storage_options: Any | None,
    *,
    is_first: bool,
) -> None:
    """Save a whole module; ranks that are connected already take part, of others the first alone.

    Args:
        module: the user's.
        io: writes the checkpoint.
        checkpoint: Lightning's.
        path: of the checkpoint.
        storage_options: of its file system.
        is_first: whether this is global rank 0.
    """
    tied = aliases(module)
    names = [*dict(module.named_parameters(remove_duplicate=False)), *dict(module.named_buffers())]
    own = {"local_aliases": tied, "aliases": tied, "about": about_module(module, names)}
    if is_first or dist.is_initialized():
        io.save_checkpoint({**checkpoint, "lightning_megatron": own}, path, storage_options=storage_options)
