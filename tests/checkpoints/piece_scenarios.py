"""Saves tensors held in pieces at one layout and loads them at another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.checkpoints.files.dcp_plans import PieceLoadPlanner, PieceSavePlanner
from lightning_megatron.checkpoints.files.folder import Folder
from lightning_megatron.checkpoints.files.storage import BoxReader, BoxWriter
from lightning_megatron.mesh.parts.boxes import ShardSpec, key_value_heads, packed_ranges
from lightning_megatron.mesh.parts.pieces import PiecedTensor

SHAPES = {
    "qkv": (24, 5),
    "row": (7, 12),
    "conv1d": (5, 24),
    "vocabulary": (101, 3),
    "kv": (6, 4),
    "norm": (11,),
    "step": (),
}


def logical(name: str) -> Tensor:
    """The same numbers on every rank and at every layout."""
    size = torch.Size(SHAPES[name]).numel()
    numbers = torch.arange(size, dtype=torch.float64).reshape(SHAPES[name]) + len(name) / 7
    return numbers.to(torch.bfloat16) if name == "row" else numbers


def tensor_spec(name: str, parts: int, index: int) -> ShardSpec:
    """How a rank of the tensor group holds a tensor."""
    shape = SHAPES[name]
    if name == "qkv":
        return ShardSpec.along(shape, 0, packed_ranges((12, 6, 6), parts, index))
    if name == "conv1d":
        return ShardSpec.along(shape, 1, packed_ranges((12, 6, 6), parts, index))
    if name == "row":
        return ShardSpec.along(shape, 1, [(12 * index // parts, 12 * (index + 1) // parts)])
    if name == "vocabulary":
        length = 128 // parts
        return ShardSpec.along(shape, 0, [(index * length, (index + 1) * length)], length)
    if name == "kv":
        heads = key_value_heads(6, 3, parts, index)
        return ShardSpec.along(shape, 0, [(2 * head, 2 * head + 2) for head in heads])
    return ShardSpec.whole(shape)


def pieces(mesh: DeviceMesh, flat: bool) -> dict[str, PiecedTensor]:
    """This rank's pieces, empty: slices over the tensor axis, and flat shards of those over the data axis."""
    found = {}
    t, data, parts = mesh["tensor_parallel"].get_local_rank(), mesh["data_parallel"], mesh["tensor_parallel"].size()
    for name in SHAPES:
        spec = tensor_spec(name, parts, t)
        if flat and SHAPES[name]:
            size = torch.Size(spec.local_shape).numel()
            cut = -(-size // data.size())
            start = min(data.get_local_rank() * cut, size)
            spec = spec.flat_range(start, min(start + cut, size))
        found[name] = PiecedTensor(spec, torch.zeros(spec.local_shape, dtype=logical(name).dtype))
    return found


def save(mesh: DeviceMesh, path: str, flat: bool) -> dict[str, int]:
    """Fill the pieces from the logical tensors and save them; returns the size of every file."""
    mine = pieces(mesh, flat)
    for name, piece in mine.items():
        for box in piece.spec.boxes:
            box.of_local(piece.local).copy_(box.of_full(logical(name)))
    dcp.save(mine, storage_writer=BoxWriter(Folder(path)), planner=PieceSavePlanner())
    return {file.name: file.stat().st_size for file in Path(path).iterdir()}


def load(mesh: DeviceMesh, path: str, flat: bool) -> Any:
    """Load pieces of another layout; returns the names of those that differ from the logical tensors."""
    mine = pieces(mesh, flat)
    dcp.load(mine, storage_reader=BoxReader(Folder(path)), planner=PieceLoadPlanner())
    wrong = []
    for name, piece in mine.items():
        held = torch.zeros(piece.spec.local_shape, dtype=torch.bool)
        for box in piece.spec.boxes:
            box.of_local(held).fill_(True)
            if not torch.equal(box.of_local(piece.local), box.of_full(logical(name))):
                wrong.append(f"{name} at {box.offset}")
        if piece.local.flatten()[~held.flatten()].abs().sum() > 0:
            wrong.append(f"padding of {name}")
    return wrong
