"""Checkpoints as directories: tensors by name through ``torch.distributed.checkpoint``, the rest in one small file.

::

    epoch=1-step=40.ckpt/
        tensors/      every parameter, buffer and optimizer tensor under its own name, each written once
        meta.pt       loops, callbacks, schedulers, hyperparameters, optimizer groups
        COMPLETE      written last

A checkpoint is written under a temporary name, flushed to disk and renamed, so a directory of the final name is
whole. One without its marker is refused.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.data import AttributeDict
from torch import Tensor

_TENSORS = "tensors"
_META = "meta.pt"
_MARKER = "COMPLETE"
_SAFE_TYPES: list[Any] = [AttributeDict]


class MegatronCheckpointIO(CheckpointIO):
    """Saves and loads checkpoint directories; every rank takes part.

    Args:
        weights_only: whether ``meta.pt`` may hold plain data only. ``False`` also loads arbitrary pickled objects
            (custom hyperparameter types), which runs code from the file: only for checkpoints you trust.
    """

    def __init__(self, weights_only: bool = True) -> None:
        self._weights_only = weights_only

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write ``checkpoint``; collective over all ranks.

        Args:
            checkpoint: Lightning's checkpoint, with ``"state_dict"`` and ``"optimizer_states"`` keyed by parameter name
                and holding this rank's tensors only.
            path: directory to create; one of that name is replaced once the new one is whole.
            storage_options: not used by local directories; anything but ``None`` is refused.

        Raises:
            ValueError: ``storage_options`` are given.
        """
        if storage_options is not None:
            raise ValueError("`storage_options` must be None: MegatronCheckpointIO writes to mounted file systems.")
        path = Path(path)
        tensors, meta = _separate(checkpoint)
        temporary = path.with_name(f".{path.name}.{_agree(uuid.uuid4().hex[:8])}.incomplete")
        error: BaseException | None = None
        try:
            dcp.save(tensors, checkpoint_id=temporary / _TENSORS, no_dist=not _distributed())
            if _is_first():
                torch.save(meta, temporary / _META)
                _publish(temporary, path)
        except BaseException as raised:
            error = raised
        failed = _agree_any(error is not None)
        if error is not None:
            shutil.rmtree(temporary, ignore_errors=True)
            raise error
        if failed:
            raise RuntimeError(f"the checkpoint {path} was not saved, because another rank could not write its part.")

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read everything but the tensors; :meth:`load_tensors` fills those in.

        Raises:
            FileNotFoundError: there is no checkpoint at ``path``.
            RuntimeError: the directory has no completion marker.
        """
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"no checkpoint at {path}.")
        if path.is_file():
            return dict(torch.load(path, map_location="cpu", weights_only=self._choose(weights_only)))
        if not (path / _MARKER).exists():
            raise RuntimeError(f"the checkpoint {path} has no marker `{_MARKER}`: it was not written to its end.")
        with torch.serialization.safe_globals(_SAFE_TYPES):
            try:
                return dict(torch.load(path / _META, map_location="cpu", weights_only=self._choose(weights_only)))
            except Exception as error:
                if "weights_only" not in str(error).lower() and "weights only" not in str(error).lower():
                    raise
                raise RuntimeError(
                    f"{path / _META} holds objects that are not plain data ({str(error).splitlines()[0]}). If you "
                    "trust the file, pass `Trainer(plugins=[MegatronCheckpointIO(weights_only=False)])`."
                ) from error

    def _choose(self, weights_only: bool | None) -> bool:
        return self._weights_only if weights_only is None else weights_only

    @staticmethod
    def tensor_names(path: Any) -> dict[str, torch.Size]:
        """Names and shapes of the tensors in a checkpoint directory."""
        metadata = dcp.FileSystemReader(Path(path) / _TENSORS).read_metadata()
        return {name: entry.size for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")}

    @staticmethod
    def tensor_dtypes(path: Any) -> dict[str, torch.dtype]:
        """Names and dtypes of the tensors in a checkpoint directory."""
        metadata = dcp.FileSystemReader(Path(path) / _TENSORS).read_metadata()
        return {
            name: entry.properties.dtype
            for name, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "properties")
        }

    @staticmethod
    def load_tensors(path: Any, into: Mapping[str, Tensor]) -> None:
        """Fill the given tensors, in place, with those of the same name; collective over all ranks."""
        dcp.load(dict(into), checkpoint_id=Path(path) / _TENSORS, no_dist=not _distributed())

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint directory, link or file; the marker goes first, so a half-deleted one is not taken
        for whole.
        """
        path = Path(path)
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            (path / _MARKER).unlink(missing_ok=True)
            shutil.rmtree(path)

    def teardown(self) -> None:
        """Nothing runs in the background."""


def _separate(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a checkpoint into tensors by name and the rest."""
    tensors = {name: value for name, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)}
    meta = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    meta["state_dict_extra"] = {n: v for n, v in checkpoint["state_dict"].items() if not isinstance(v, Tensor)}
    groups = []
    for index, state in enumerate(checkpoint.get("optimizer_states", [])):
        groups.append(state["param_groups"])
        for parameter, entries in state["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{index}.{parameter}.{key}"] = value
    if "optimizer_states" in checkpoint:
        meta["optimizer_groups"] = groups
    return {name: tensor.detach() for name, tensor in tensors.items()}, meta


def _publish(temporary: Path, path: Path) -> None:
    """Flush a finished directory to disk and give it its name."""
    (temporary / _MARKER).write_text("1\n")
    for folder, _, files in os.walk(temporary):
        for file in files:
            _flush(Path(folder) / file)
        _flush(Path(folder))
    replaced = None
    if path.exists() or path.is_symlink():
        replaced = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.replaced")
        path.rename(replaced)
    temporary.rename(path)
    _flush(path.parent)
    if replaced is not None:
        MegatronCheckpointIO().remove_checkpoint(replaced)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _is_first() -> bool:
    return not _distributed() or dist.get_rank() == 0


def _agree(value: str) -> str:
    if not _distributed():
        return value
    holder = [value]
    dist.broadcast_object_list(holder, 0)
    return holder[0]


def _agree_any(flag: bool) -> bool:
    if not _distributed():
        return flag
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)
