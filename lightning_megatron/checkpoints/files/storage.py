"""Files of a checkpoint: raw elements, one file per rank, and an index with the location of every box.

::

    index.json      every tensor's logical shape and dtype, and for each box: offset, shape, file, byte in the file
    rank-00000.bin  the boxes that rank 0 wrote, one after the other, each starting at a multiple of 64 bytes

No file is a pickle, so reading cannot run code. A part of a box is read without reading the rest of the file.
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
    """Location of a box.

    Attributes:
        file: name of the file.
        start: index of its first byte in the file.
    """

    file: str
    start: int


@dataclass(frozen=True)
class FileSum:
    """Size of a file in bytes, and its checksum (:mod:`~lightning_megatron.checkpoints.files.checksums`)."""

    bytes: int
    checksum: str


class SummedFile:
    """Writes tensors to an open file and computes its checksum, in a thread that overlaps with writing.

    Args:
        file: open for writing.
        lags: whether the checksum may fall behind by any number of tensors, which the caller must keep alive;
            otherwise, and for tensors that had to be copied, it falls behind by at most one.
    """

    def __init__(self, file: IO[bytes], *, lags: bool = False) -> None:
        self._file = file
        self._lags = lags
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self._sum: ThreadFuture[None] | None = None
        self._total = Checksum()
        self.position = 0

    def write(self, tensor: Tensor) -> int:
        """Append a tensor's elements, aligned to 64 bytes; returns the index of their first byte."""
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
        self._sum = self._pool.submit(self._add, [data])
        self._file.write(data)
        self.position += data.nbytes

    def _add(self, only: list[memoryview]) -> None:
        self._total.add(only.pop())  # the pool holds its arguments for a moment longer than the result is waited for

    def _settle(self) -> None:
        if self._sum is not None:
            self._sum.result()

    def close(self) -> FileSum:
        """Finish the checksum and return it with the size; the file stays open.

        Flush the file before: the checksum is computed meanwhile.
        """
        self._settle()
        self._pool.shutdown()
        return FileSum(self.position, str(self._total))


class BoxWriter(StorageWriter):
    """Writes this rank's boxes into one file; the coordinator adds the index.

    Args:
        folder: to write into; the coordinator creates it.

    Attributes:
        files: name -> size and checksum of every file of the checkpoint; complete on the coordinator after
            :meth:`finish`.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.files: dict[str, FileSum] = {}
        self._rank = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a writer is used for one save only."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder, and give each rank's plan its file number; runs on the coordinator before any write."""
        self.folder.make()
        return [SavePlan(plan.items, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the boxes of the plan into this rank's file; without boxes no file is written."""
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
        """Write the index; runs on the coordinator after all ranks have written their files."""
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
        """Write a small file beside the boxes, and add it to :attr:`files`."""
        self.folder.write(name, data)
        self.files[name] = FileSum(len(data), checksum(data))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Always true: a writer has its folder, and ignores identifiers."""
        return True


class BoxReader(StorageReader):
    """Reads boxes, or parts of them, from a folder that :class:`BoxWriter` filled."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._places: dict[tuple[str, int], tuple[Place, tuple[int, ...], torch.dtype]] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a reader is used for one load only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index: shapes, dtypes and boxes of all saved tensors."""
        metadata, _ = decode_index(json.loads(self.folder.read(INDEX)))
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the location of every box from the metadata."""
        places: dict[str, list[Place]] = metadata.storage_data
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            for number, chunk in enumerate(entry.chunks):
                key, place = (name, number), places[name][number]
                self._places[key] = (place, tuple(chunk.sizes), entry.properties.dtype)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Sort the reads by file and position."""
        return LoadPlan(sorted(plan.items, key=self._order))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged: every rank reads for itself."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of the plan into its target tensor, in place.

        Raises:
            EOFError: a file ends before a box does.
        """
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
        """Always true: a reader has its folder, and ignores identifiers."""
        return True


def _is_run(target: Tensor, dtype: torch.dtype, shape: tuple[int, ...], extent: tuple[int, ...]) -> bool:
    """Whether a read covers full rows of a stored box, and its target is contiguous CPU memory of the same dtype."""
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
    """Read a rectangle of a stored box.

    Rows (first dim) are read in full, unless a contiguous part of at least 4 KiB of each is wanted.

    Args:
        file: open for reading.
        place: of the box.
        shape: of the box.
        dtype: of the box.
        offset: of the rectangle in the box.
        extent: shape of the rectangle.

    Returns:
        A CPU tensor of shape ``extent``.

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
    """View the memory of a contiguous CPU tensor as bytes."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def encode_index(metadata: Metadata, places: dict[MetadataIndex, Place]) -> dict[str, Any]:
    """Turn metadata and the locations of boxes into the content of ``index.json``."""
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
    """Inverse of :func:`encode_index`; the metadata's ``storage_data`` holds the locations too.

    Raises:
        ValueError: the index names a dtype that torch does not have.
    """
    tensors: dict[str, Any] = {}
    places: dict[str, list[Place]] = {}
    for name, entry in index["tensors"].items():
        dtype = getattr(torch, entry["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"`{name}` has dtype {entry['dtype']!r}, which this version of torch does not support.")
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s, _, _ in entry["boxes"]]
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry["shape"]), chunks)
        places[name] = [Place(file, start) for _, _, file, start in entry["boxes"]]
    return Metadata(tensors, storage_data=places), places
