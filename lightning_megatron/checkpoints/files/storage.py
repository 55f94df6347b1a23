"""Files of a checkpoint: raw elements, one file per rank, and an index that says where every box lies.

::

    index.json      every tensor's logical shape and type, and for each box: offset, shape, file, place in the file
    rank-00000.bin  the boxes that rank 0 wrote, one after the other, each starting at a multiple of 64 bytes

Nothing here is a pickle, so reading cannot run code, and a part of a box is read without reading the rest.
"""

from __future__ import annotations

import json
import math
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from lightning_megatron.checkpoints.files.checksums import Checksum, checksum
from lightning_megatron.checkpoints.files.folder import Folder

INDEX = "index.json"
_ALIGNMENT = 64
_WORTH_A_READ = 4096  # bytes
_NOTHING = memoryview(bytes(_ALIGNMENT))


@dataclass(frozen=True)
class Place:
    """Where a box lies: file and first byte in it."""

    file: str
    start: int


@dataclass(frozen=True)
class FileSum:
    """A file's size in bytes and checksum, see :mod:`~lightning_megatron.checkpoints.files.checksums`."""

    bytes: int
    checksum: str


class SummedFile:
    """An open file that adds up its own checksum, in a thread of its own while the disk is busy.

    Args:
        file: open for writing.
        lags: the sum may fall behind by any number of tensors that the caller keeps alive; otherwise, and where a copy
            was made, by one.
    """

    def __init__(self, file: IO[bytes], *, lags: bool = False) -> None:
        self._file = file
        self._lags = lags
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self._sum: ThreadFuture[None] | None = None
        self._total = Checksum()
        self.position = 0

    def write(self, tensor: Tensor) -> int:
        """Append a tensor's elements; returns the byte they start at."""
        padding = -self.position % _ALIGNMENT
        if padding:
            self._append(_NOTHING[:padding])
        start = self.position
        if tensor.numel():
            host = tensor.detach().to("cpu").contiguous()
            if not self._lags or host.data_ptr() != tensor.data_ptr():
                self._settle()
            self._append(bytes_of(host))
        return start

    def _append(self, data: memoryview) -> None:
        self._sum = self._pool.submit(self._total.add, data)
        self._file.write(data)
        self.position += data.nbytes

    def _settle(self) -> None:
        if self._sum is not None:
            self._sum.result()

    def close(self) -> FileSum:
        """End the sum; the file stays open, and is best flushed before, as the sum goes on meanwhile."""
        self._settle()
        self._pool.shutdown()
        return FileSum(self.position, str(self._total))


class BoxWriter(StorageWriter):
    """Writes this rank's boxes into one file; the first rank adds the index.

    Args:
        folder: made by the first rank, if it is not there.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.files: dict[str, FileSum] = {}
        self._rank = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one save to the next: a writer serves one."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the files, and make the folder before any rank writes into it."""
        self.folder.make()
        return [SavePlan(plan.items, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the boxes of the plan; a rank without any writes no file."""
        results: list[WriteResult] = []
        if plan.items:
            name = f"rank-{plan.storage_data:05}.bin"
            with self.folder.open(name, "wb") as file:
                summed = SummedFile(file, lags=True)
                for item in plan.items:
                    data = planner.resolve_data(item)
                    assert isinstance(data, Tensor)
                    results.append(WriteResult(item.index, data.nbytes, Place(name, summed.write(data))))
                self.folder.flush(file)
                total = summed.close()
            results.append(WriteResult(MetadataIndex(""), total.bytes, (name, total)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; on the first rank, once every rank has written its file."""
        places: dict[MetadataIndex, Place] = {}
        for result in (each for rank in results for each in rank):
            if isinstance(result.storage_data, Place):
                places[result.index] = result.storage_data
            else:
                name, total = result.storage_data
                self.files[name] = total
        index = json.dumps(encode_index(metadata, places), separators=(",", ":")).encode()
        self.add_file(INDEX, index)

    def add_file(self, name: str, data: bytes) -> None:
        """Write a small file beside the boxes, counted in :attr:`files`."""
        self.folder.write(name, data)
        self.files[name] = FileSum(len(data), checksum(data))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """A writer is made for its folder; identifiers are not used."""
        return True


class BoxReader(StorageReader):
    """Reads boxes, or parts of them, from a folder that :class:`BoxWriter` filled."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._places: dict[tuple[str, int], tuple[Place, tuple[int, ...], torch.dtype]] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one load to the next: a reader serves one."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Shapes, types and boxes of everything that was saved."""
        metadata, _ = decode_index(json.loads(self.folder.read(INDEX)))
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn where every box lies."""
        places: dict[str, list[Place]] = metadata.storage_data
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            for number, chunk in enumerate(entry.chunks):
                key, place = (name, number), places[name][number]
                self._places[key] = (place, tuple(chunk.sizes), entry.properties.dtype)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Read in the order of the files."""
        return LoadPlan(sorted(plan.items, key=self._order))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads for itself."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every part of the plan to its place."""
        opened: tuple[str, IO[bytes]] | None = None
        try:
            for item in plan.items:
                place, shape, dtype = self._place(item)
                if opened is None or opened[0] != place.file:
                    if opened is not None:
                        opened[1].close()
                    opened = place.file, self.folder.open(place.file, "rb")
                target = planner.resolve_tensor(item)
                offset, extent = tuple(item.storage_offsets), tuple(item.lengths)
                if _is_run(target, dtype, shape, extent):
                    start = place.start + sum(offset[:1]) * math.prod(shape[1:]) * dtype.itemsize
                    _read_into(opened[1], start, bytes_of(target))
                else:
                    target.copy_(read_part(opened[1], place, shape, dtype, offset, extent))
                planner.commit_tensor(item, target)
        finally:
            if opened is not None:
                opened[1].close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: ReadItem) -> tuple[Place, tuple[int, ...], torch.dtype]:
        assert item.storage_index.index is not None
        return self._places[item.storage_index.fqn, item.storage_index.index]

    def _order(self, item: ReadItem) -> tuple[str, int]:
        place = self._place(item)[0]
        return place.file, place.start

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """A reader is made for its folder; identifiers are not used."""
        return True


def _is_run(target: Tensor, dtype: torch.dtype, shape: tuple[int, ...], extent: tuple[int, ...]) -> bool:
    """Whether whole rows of a stored box go to memory that takes them as they are."""
    fits = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
    return fits and extent[1:] == shape[1:] and target.numel() > 0


def read_part(
    file: IO[bytes],
    place: Place,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    offset: tuple[int, ...],
    extent: tuple[int, ...],
) -> Tensor:
    """Rectangle ``offset`` + ``extent`` of a stored box of ``shape``.

    Rows (first dim) are read whole, unless only a part of them is wanted and that part is worth a read of its own.

    Raises:
        EOFError: the file ends before the box does.
    """
    if not shape:
        return _read(file, place.start, (), dtype)
    row = math.prod(shape[1:]) * dtype.itemsize
    inner_row = math.prod(extent[1:2]) * math.prod(shape[2:]) * dtype.itemsize
    if len(shape) > 1 and extent[2:] == shape[2:] and extent[1] < shape[1] and inner_row >= _WORTH_A_READ:
        tensor = torch.empty(extent, dtype=dtype)
        skipped = offset[1] * math.prod(shape[2:]) * dtype.itemsize
        for number in range(extent[0]):
            _read_into(file, place.start + (offset[0] + number) * row + skipped, bytes_of(tensor[number]))
        return tensor
    rows = _read(file, place.start + offset[0] * row, (extent[0], *shape[1:]), dtype)
    inner = tuple(slice(o, o + n) for o, n in zip(offset[1:], extent[1:], strict=True))
    return rows[(slice(None), *inner)]


def _read(file: IO[bytes], start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    _read_into(file, start, bytes_of(tensor))
    return tensor


def _read_into(file: IO[bytes], start: int, view: memoryview) -> None:
    file.seek(start)
    done = 0
    while done < view.nbytes:
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError(f"{getattr(file, 'name', file)} ends at byte {start + done}, {view.nbytes - done} too early")
        done += count


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def encode_index(metadata: Metadata, places: dict[MetadataIndex, Place]) -> dict[str, Any]:
    """The index as plain data."""
    tensors: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        boxes = []
        for chunk in entry.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            boxes.append([list(chunk.offsets), list(chunk.sizes), place.file, place.start])
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"shape": list(entry.size), "dtype": dtype, "boxes": boxes}
    return {"format": 1, "tensors": tensors}


def decode_index(index: dict[str, Any]) -> tuple[Metadata, dict[str, list[Place]]]:
    """Inverse of :func:`encode_index`; the places are in the metadata's ``storage_data`` too.

    Raises:
        ValueError: the index names a type that torch does not have.
    """
    tensors: dict[str, Any] = {}
    places: dict[str, list[Place]] = {}
    for name, entry in index["tensors"].items():
        dtype = getattr(torch, entry["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"`{name}` has the type {entry['dtype']!r}, which this torch does not know.")
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s, _, _ in entry["boxes"]]
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry["shape"]), chunks)
        places[name] = [Place(file, start) for _, _, file, start in entry["boxes"]]
    return Metadata(tensors, storage_data=places), places
