"""A broadcast of many tensors in few messages, each of one dtype: ranks wait for each other once per message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.mesh.messages.collectives import raw_broadcast

_CHUNK_BYTES = 256 * 1024 * 1024


def broadcast_tensors(tensors: Sequence[Tensor], source: int, group: Any) -> None:
    """Overwrite ``tensors`` with those of global rank ``source``, in a few flat messages."""
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
        raw_broadcast(flat, source, group)
        offset = 0
        for tensor in chunk:
            tensor.detach().copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()


def _chunks(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    chunks: list[list[Tensor]] = []
    size = 0
    for tensor in sorted(tensors, key=lambda t: str(t.dtype)):
        bytes_ = tensor.numel() * tensor.element_size()
        if not chunks or chunks[-1][0].dtype != tensor.dtype or size + bytes_ > _CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(tensor)
        size += bytes_
    return chunks
