"""One interface to the tensors in checkpoint directories, Lightning ``.ckpt`` files and Hugging Face safetensors.

All three formats store raw elements at known positions in files. A rank's slice, or a single tensor, is therefore read
without the rest of the model.
"""

from __future__ import annotations

import io
import json
import pickle
import pkgutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_megatron.checkpoints.files.dcp_plans import PieceLoadPlanner, saved_kinds
from lightning_megatron.checkpoints.files.directory import ABOUT, META, CheckpointFolder, open_checkpoint
from lightning_megatron.checkpoints.files.folder import Folder
from lightning_megatron.checkpoints.files.storage import BoxReader, Place
from lightning_megatron.checkpoints.state.stored import optimizer_names, plain_values
from lightning_megatron.mesh.parts.boxes import ShardSpec
from lightning_megatron.mesh.parts.pieces import PiecedTensor

_BEGINNINGS = (b"PK", b"\x80")  # of what torch.save writes: a zip archive, or, in old versions, a pickle
_SAFE_TYPES = ("lightning.fabric.utilities.data:AttributeDict",)
"""Types besides plain data that files may hold: Lightning's dict of hyperparameters. Imported when a file is read."""

_LONGEST_HEADER = 100_000_000  # bytes, by the format
_SAFETENSORS_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES_OF_TYPES = {dtype: name for name, dtype in _SAFETENSORS_TYPES.items()}


@dataclass(frozen=True)
class Source:
    """An opened checkpoint: its tensors by name, and the other data stored with them.

    Attributes:
        kind: ``"directory"``, ``"lightning"`` or ``"safetensors"``.
        folder: holds the files.
        metadata: shapes, dtypes and boxes; ``storage_data`` holds the locations of the boxes.
        meta: everything except the tensors of the module and of its optimizers.
        about: step, layout, versions.
    """

    kind: str
    folder: Folder
    metadata: Metadata
    meta: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Name -> logical shape and dtype, for every tensor."""
        return saved_kinds(self.metadata)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors -> the name they are stored under."""
        own: Mapping[str, Any] = self.meta.get("lightning_megatron", {})
        return own.get("aliases", {})

    def read(self, name: str) -> Tensor:
        """Read one tensor in full, on the CPU.

        Raises:
            KeyError: there is no tensor of that name.
        """
        kinds = {**self.kinds, **saved_kinds(self.metadata, name)}
        if name not in kinds:
            raise KeyError(f"no tensor `{name}` in {self.folder}")
        shape, dtype = kinds[name]
        piece = PiecedTensor(ShardSpec.whole(shape), torch.empty(shape, dtype=dtype))
        self.fill({name: (name, piece)})
        return piece.local

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Compare the checksums of a checkpoint directory's files; see :meth:`CheckpointFolder.verify`.

        Other kinds have no checksums.
        """
        if isinstance(self.folder, CheckpointFolder):
            self.folder.verify(share, shares)

    def fill(self, into: Mapping[str, tuple[str, PiecedTensor]]) -> None:
        """Load pieces in place, reading only their boxes.

        Args:
            into: any key -> stored name of the tensor, and the piece to fill.

        Raises:
            KeyError: a tensor is not in the checkpoint.
            ValueError: a tensor has another shape there.
        """
        reader = BoxReader(self.folder)
        planner = PieceLoadPlanner({key: stored for key, (stored, _) in into.items()})
        planner.set_up_planner({key: piece for key, (_, piece) in into.items()}, self.metadata)
        reader.set_up_storage_reader(self.metadata, True)
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner)


def open_source(path: Any, *, trust: bool = False) -> Source:
    """Open a checkpoint of any of the three formats.

    Args:
        path: a checkpoint directory, a ``.ckpt`` file, a ``.safetensors`` file, or a folder with safetensors.
        trust: whether pickled objects other than plain data may be loaded, which runs code from the file.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        RuntimeError: the checkpoint is incomplete, or holds more than plain data.
    """
    where = Folder(path)
    if where.is_file():
        if where.name.endswith(".safetensors"):
            return _open_safetensors(where.parent, {where.name: None})
        return _open_lightning(where, trust)
    if where.has("model.safetensors.index.json"):
        listed = json.loads(where.read("model.safetensors.index.json"))["weight_map"]
        return _open_safetensors(where, dict.fromkeys(listed.values()))
    if where.has("model.safetensors"):
        return _open_safetensors(where, {"model.safetensors": None})
    return _open_directory(path, trust)


def load_whole(path: Any, *, trust: bool = False) -> dict[str, Any]:
    """Load a checkpoint directory, after verifying it, as the dictionary that plain Lightning uses.

    The optimizers' state is left out.

    Args:
        path: the directory.
        trust: as for :func:`open_source`.
    """
    source = open_source(path, trust=trust)
    source.verify()
    optimizers = {stored for stored, *_ in optimizer_names(source.kinds)}
    state: dict[str, Any] = {name: source.read(name) for name in source.kinds if name not in optimizers}
    state |= {alias: state[name] for alias, name in source.aliases.items() if name in state}
    return {**source.meta, "state_dict": state | source.meta.get("state_dict_extra", {})}


def _open_directory(path: Any, trust: bool) -> Source:
    data = open_checkpoint(path)
    metadata = BoxReader(data).read_metadata()
    meta = load_plain(data.read(META), f"{data}/{META}", trust)
    return Source("directory", data, metadata, meta, json.loads(data.read(ABOUT)))


def load_plain(content: bytes, what: str, trust: bool) -> dict[str, Any]:
    """Unpickle a dictionary.

    Args:
        content: the pickle.
        what: name of the file, for the error.
        trust: whether objects other than plain data may be loaded, which runs code from the file.

    Raises:
        RuntimeError: it is no such file, or it holds other objects and ``trust`` is false.
    """
    if not content.startswith(_BEGINNINGS):
        found = f"begins with {content[:8]!r}" if content else "is empty"
        raise RuntimeError(
            f"{what} is not a checkpoint: it {found}, which no file of torch.save does. Writing it was interrupted, or "
            "it is a file of another kind; use another checkpoint."
        )
    with _safe_types():
        try:
            return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=not trust))
        except pickle.UnpicklingError as error:
            raise RuntimeError(
                f"{what} holds objects that are not plain data ({str(error).splitlines()[0]}). If you trust the file, "
                "pass `Trainer(plugins=[MegatronCheckpointIO(weights_only=False)])`, or `--trust` on the command line."
            ) from error


def _safe_types() -> AbstractContextManager[None]:
    """Context in which ``torch.load(weights_only=True)`` accepts ``_SAFE_TYPES`` too."""
    return torch.serialization.safe_globals([pkgutil.resolve_name(name) for name in _SAFE_TYPES])


def _header(content: bytes, file: str) -> dict[str, Any]:
    """Header of a safetensors file: names, dtypes, shapes and offsets of its tensors.

    Raises:
        ValueError: it does not begin as one.
    """
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{file} is no whole safetensors file: what it says of its tensors cannot be read ({error}). Copy or "
            "download it again."
        ) from error


def _open_safetensors(folder: Folder, files: Mapping[str, Any]) -> Source:
    tensors: dict[str, STORAGE_TYPES] = {}
    places: dict[str, list[Place]] = {}
    for name in files:
        with folder.open(name, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = _header(file.read(min(length, _LONGEST_HEADER)), f"{folder}/{name}")
        for key, entry in header.items():
            if key != "__metadata__":
                dtype = _SAFETENSORS_TYPES[entry["dtype"]]
                tensors[key] = one_box(tuple(entry["shape"]), dtype)
                places[key] = [Place(name, 8 + length + entry["data_offsets"][0])]
    config = json.loads(folder.read("config.json")) if folder.has("config.json") else None
    return Source("safetensors", folder, Metadata(tensors, storage_data=places), {}, {"huggingface": {"": config}})


def _open_lightning(where: Folder, trust: bool) -> Source:
    """Open a ``.ckpt`` file and find the positions of its tensors, without reading their elements."""
    path = Path(where.path)
    if not where.is_local:
        raise RuntimeError(f"{where} must be on a mounted file system; copy it there first.")
    try:
        with _safe_types(), FakeTensorMode():
            content = dict(torch.load(path, map_location="cpu", weights_only=not trust))
    except pickle.UnpicklingError as error:
        raise RuntimeError(f"{path} holds objects that are not plain data; `--trust` loads them: {error}") from error
    tensors: dict[str, STORAGE_TYPES] = {}
    places: dict[str, list[Place]] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[int, int, torch.Size], str] = {}
    for name, tensor in _stored_tensors(content):
        start = _start_of(name, tensor)
        alike = first.setdefault((start, tensor.nbytes, tensor.shape), name)
        if alike != name and tensor.numel():
            tied[name] = alike
            continue
        tensors[name] = one_box(tuple(tensor.shape), tensor.dtype)
        places[name] = [Place(path.name, start)]
    meta = {key: value for key, value in content.items() if key not in ("state_dict", "optimizer_states")}
    meta["lightning_megatron"] = {**content.get("lightning_megatron", {}), "aliases": tied}
    meta["optimizer_groups"] = [state["param_groups"] for state in content.get("optimizer_states", [])]
    meta["optimizer_values"] = [
        {key if isinstance(key, str) else f"#{key}": own for key, own in values.items()}
        for values in plain_values(content.get("optimizer_states", []))
    ]
    _make_real(meta, path)
    return Source("lightning", where.parent, Metadata(tensors, storage_data=places), meta)


def _stored_tensors(content: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    state = content.get("state_dict", content)
    found = [(name, value) for name, value in state.items() if isinstance(value, Tensor)]
    names = [name for name, _ in found]
    for index, optimizer in enumerate(content.get("optimizer_states", [])):
        for key, entries in optimizer["state"].items():
            parameter = key if isinstance(key, str) else f"#{key}"
            found += [
                (f"optimizer.{index}.{parameter}.{state_name}", value)
                for state_name, value in entries.items()
                if isinstance(value, Tensor)
            ]
    assert len(set(names)) == len(names)
    return found


def _start_of(name: str, tensor: Tensor) -> int:
    if not tensor.is_contiguous():
        raise RuntimeError(f"`{name}` is stored with strides {tensor.stride()}; save it contiguously.")
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if offset is None:
        raise RuntimeError(f"`{name}` has no place of its own in the file.")
    return int(offset) + int(tensor.storage_offset()) * tensor.element_size()


def _make_real(value: Any, path: Path) -> Any:
    """Replace the fake tensors of callbacks and hyperparameters by real ones, read from the file."""
    if isinstance(value, Tensor):
        start = _start_of("a tensor beside the model", value)
        with path.open("rb") as file:
            file.seek(start)
            data = bytearray(file.read(value.nbytes))
        return torch.frombuffer(data, dtype=value.dtype).reshape(value.shape) if data else torch.empty(value.shape)
    if isinstance(value, dict):
        for key in value:
            value[key] = _make_real(value[key], path)
    elif isinstance(value, list):
        value[:] = [_make_real(each, path) for each in value]
    elif type(value) is tuple:
        return tuple(_make_real(each, path) for each in value)
    return value


def one_box(shape: tuple[int, ...], dtype: torch.dtype) -> TensorStorageMetadata:
    """A tensor that is stored whole."""
    box = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [box])


def safetensors_type(dtype: torch.dtype) -> str:
    """Name of a dtype in the safetensors format.

    Raises:
        ValueError: the format does not have it.
    """
    if dtype not in _NAMES_OF_TYPES:
        raise ValueError(f"safetensors cannot hold {dtype}; `--format lightning` writes a file that can.")
    return _NAMES_OF_TYPES[dtype]
