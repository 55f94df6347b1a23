"""Imports a Lightning ``.ckpt`` or Hugging Face safetensors into a checkpoint directory, one tensor at a time."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from lightning_megatron.checkpoints.files.directory import ABOUT, META, data_folder, new_token, publish
from lightning_megatron.checkpoints.files.folder import Folder
from lightning_megatron.checkpoints.files.library_names import in_module
from lightning_megatron.checkpoints.files.sources import Source, one_box
from lightning_megatron.checkpoints.files.storage import BoxWriter, Place, SummedFile


def import_checkpoint(source: Source, path: Any, *, prefix: str = "") -> list[str]:
    """Write a checkpoint directory with the tensors of ``source``.

    Args:
        source: an opened Lightning file or Hugging Face model.
        path: directory to create.
        prefix: prepended to the names of a Hugging Face model: ``model.`` if the module holds it as ``self.model``.

    Returns:
        The names of the tensors written.
    """
    source = in_module(source)
    target = Folder(path)
    names = {name: _renamed(name, source, prefix) for name in source.kinds}
    writer = BoxWriter(data_folder(target, new_token()))
    writer.folder.make()
    results: list[WriteResult] = []
    with writer.folder.open("rank-00000.bin", "wb") as file:
        summed = SummedFile(file)
        for stored, name in names.items():
            tensor = source.read(stored)
            place = Place("rank-00000.bin", summed.write(tensor))
            results.append(WriteResult(MetadataIndex(name, (0,) * tensor.ndim), tensor.nbytes, place))
        total = summed.close()
        writer.folder.flush(file)
    results.append(WriteResult(MetadataIndex(""), total.bytes, ("rank-00000.bin", total)))
    tensors: dict[str, STORAGE_TYPES] = {name: one_box(*source.kinds[stored]) for stored, name in names.items()}
    writer.finish(Metadata(tensors), [results])
    meta, about = _meta(source, prefix)
    buffer = io.BytesIO()
    torch.save(meta, buffer)
    writer.add_file(META, buffer.getvalue())
    writer.add_file(ABOUT, json.dumps(about, indent=1).encode())
    publish(target, writer.folder, writer.files, int(about["step"]), time.time())
    return sorted(names.values())


def _renamed(name: str, source: Source, prefix: str) -> str:
    return prefix + name if source.kind == "safetensors" else name


def _meta(source: Source, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    meta = dict(source.meta)
    step = int(meta.get("global_step", 0))
    meta.setdefault("epoch", 0)
    meta.setdefault("global_step", step)
    meta.setdefault("pytorch-lightning_version", "2.6.0")
    aliases = {_renamed(a, source, prefix): _renamed(b, source, prefix) for a, b in source.aliases.items()}
    about: dict[str, Any] = {"step": step, "epoch": meta["epoch"], "imported": source.kind}
    config = source.about.get("huggingface", {}).get("")
    if config is not None:
        about["huggingface"] = {prefix: config}
    meta["lightning_megatron"] = {**meta.get("lightning_megatron", {}), "aliases": aliases, "about": about}
    meta["state_dict_extra"] = {}
    return meta, about
