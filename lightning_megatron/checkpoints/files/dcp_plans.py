"""Planners for ``torch.distributed.checkpoint`` (DCP): the boxes that each rank writes and reads.

DCP synchronizes the ranks, gathers their plans on the coordinator and reports failures to all of them. These planners
decide what is in the plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from lightning_megatron.checkpoints.files.writers import Rectangle, Shares, intersection, share_out
from lightning_megatron.mesh.parts.pieces import PiecedTensor, as_pieces

BESIDE = ".."  # in no name of a module's tensor: no part of it is empty or has a dot
STATE_BESIDE = "lightning_megatron_state"
"""Key of the note in ``meta.pt`` that stands for a state beside the module's: where it lay in the checkpoint."""


class PieceSavePlanner(SavePlanner):
    """Plans a save: every rank offers the boxes it holds, and the coordinator assigns each element to one rank."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Set the tensors to save: name -> tensor or piece."""
        self._tensors = {name: as_pieces(value) for name, value in state_dict.items()}

    def create_local_plan(self) -> SavePlan:
        """Offer all boxes of this rank."""
        items = [
            _write_item(name, value.shape, value.dtype, (box.offset, box.shape))
            for name, value in self._tensors.items()
            for box in value.spec.boxes
        ]
        shapes = {name: (value.shape, value.dtype) for name, value in self._tensors.items()}
        return SavePlan(items, planner_data=shapes)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign every element to one rank; runs on the coordinator.

        Raises:
            ValueError: ranks disagree about a tensor's shape or dtype, or part of a tensor is on no rank.
        """
        kinds = _agree_on_kinds(all_plans)
        held: dict[str, list[tuple[int, Rectangle]]] = {name: [] for name in kinds}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                chunk = _chunk_of(item)
                held[item.index.fqn].append((rank, (tuple(chunk.offsets), tuple(chunk.sizes))))
        shares = Shares([0] * len(all_plans))
        items: list[list[WriteItem]] = [[] for _ in all_plans]
        chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in kinds}
        for name, (shape, dtype) in kinds.items():
            try:
                for rank, rectangle in share_out(held[name], shape, dtype.itemsize, shares):
                    item = _write_item(name, shape, dtype, rectangle)
                    items[rank].append(item)
                    chunks[name].append(_chunk_of(item))
            except ValueError as error:
                raise ValueError(f"`{name}` cannot be saved: {error}") from error
        metadata: dict[str, STORAGE_TYPES] = {
            name: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks[name])
            for name, (shape, dtype) in kinds.items()
        }
        return [SavePlan(each) for each in items], Metadata(metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Accept the coordinator's plan."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The box's elements, as a view of this rank's memory."""
        chunk = _chunk_of(write_item)
        return self._tensors[write_item.index.fqn].part(chunk.offsets, chunk.sizes)


class PieceLoadPlanner(LoadPlanner):
    """Plans a load: fills this rank's boxes from the saved boxes that overlap them.

    Args:
        stored: key of a tensor to fill -> its stored name, if that differs.
    """

    def __init__(self, stored: Mapping[str, str] | None = None) -> None:
        self._stored = dict(stored or {})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Set the tensors to fill, by key, and the metadata of the checkpoint."""
        self._tensors: dict[str, PiecedTensor] = {name: as_pieces(value) for name, value in state_dict.items()}
        self._saved = {} if metadata is None else metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """Plan a read for every overlap of a saved box with a box of this rank.

        Raises:
            KeyError: a tensor is not in the checkpoint.
            ValueError: a tensor has another shape there.
        """
        return LoadPlan([item for name, value in self._tensors.items() for item in self._read_items(name, value)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged: every rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Refuse: these files hold tensors only.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"`{read_item.dest_index.fqn}` is not a tensor.")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Target of a read, as a view of this rank's memory."""
        name, offset, number = _place_of(read_item.dest_index)
        piece = self._tensors[name]
        return piece.part_of(piece.spec.boxes[number], offset, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the view was filled in place."""

    def _read_items(self, key: str, value: PiecedTensor) -> list[ReadItem]:
        name = self._stored.get(key, key)
        saved = self._saved.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            raise KeyError(f"`{name}` is not in the checkpoint.")
        if tuple(saved.size) != tuple(value.shape):
            raise ValueError(f"`{name}` has shape {tuple(value.shape)} here, {tuple(saved.size)} in the checkpoint.")
        items = []
        for number, chunk in enumerate(saved.chunks):
            source = tuple(chunk.offsets), tuple(chunk.sizes)
            for target, box in enumerate(value.spec.boxes):
                common = intersection((box.offset, box.shape), source)
                if common is not None:
                    place = MetadataIndex(key, common[0], target)
                    items.append(_read_item(place, common, MetadataIndex(name, source[0], number), source[0]))
        return items


def saved_kinds(metadata: Metadata, start: str = "") -> Mapping[str, tuple[torch.Size, torch.dtype]]:
    """Logical shape and type of a module's and its optimizers' tensors in a checkpoint, by name.

    Args:
        metadata: of the checkpoint.
        start: that of :func:`beside` to get the tensors of one state beside the module's instead.
    """
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and (name.startswith(start) if start else BESIDE not in name)
    }


def beside(path: str, name: str = "") -> str:
    """The stored name of a tensor of another state than the module's own, such as averaged weights.

    Args:
        path: where in Lightning's checkpoint the state lies.
        name: of the tensor in it; empty for the start of all of them.
    """
    return f"{path}{BESIDE}{name}"


def _agree_on_kinds(plans: list[SavePlan]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for rank, plan in enumerate(plans):
        for name, kind in plan.planner_data.items():
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(
                    f"`{name}` has shape {tuple(kind[0])} and type {kind[1]} on rank {rank}, but "
                    f"{tuple(kinds[name][0])} and {kinds[name][1]} on a rank before it."
                )
    return kinds


def _write_item(name: str, shape: torch.Size, dtype: torch.dtype, rectangle: Rectangle) -> WriteItem:
    offset, extent = torch.Size(rectangle[0]), torch.Size(rectangle[1])
    data = TensorWriteData(ChunkStorageMetadata(offset, extent), TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data)


def _chunk_of(item: WriteItem) -> ChunkStorageMetadata:
    """The box that ``item`` writes; every item of these planners is one of a tensor."""
    if item.tensor_data is None:
        raise TypeError(f"`{item.index.fqn}` is not a tensor.")
    return item.tensor_data.chunk


def _place_of(index: MetadataIndex) -> tuple[str, Sequence[int], int]:
    """Name, offset in the whole tensor, and number of the box here, as `_read_items` wrote them."""
    if index.offset is None or index.index is None:
        raise TypeError(f"`{index.fqn}` is read as a whole, but tensors are read box by box.")
    return index.fqn, index.offset, index.index


def _read_item(place: MetadataIndex, common: Rectangle, saved: MetadataIndex, start: Sequence[int]) -> ReadItem:
    """Plan to read rectangle ``common`` of the ``saved`` box into ``place``, whose index is that of this rank's box."""
    within = torch.Size(o - s for o, s in zip(common[0], start, strict=True))
    zeros = torch.Size([0] * len(common[0]))
    return ReadItem(LoadItemType.TENSOR, place, zeros, saved, within, torch.Size(common[1]))
