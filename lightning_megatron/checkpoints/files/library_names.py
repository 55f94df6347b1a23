"""Names and shapes that Hugging Face's models have in files, where they differ from those in the module.

``transformers`` renames tensors when it loads a model, and puts some together: the experts of a mixture are single
matrices in files and one tensor in the module. Its own table says how; this module reads and writes by it::

    in files                                            in the module
    embed_out.weight                        [v, h]      lm_head.weight                     [v, h]
    mlp.experts.0.gate_proj.weight          [i, h]  ┐
    mlp.experts.0.up_proj.weight            [i, h]  ├─▶  mlp.experts.gate_up_proj          [e, 2 i, h]
    mlp.experts.1.gate_proj.weight          [i, h]  ┘

What is put together is a tensor in several boxes, of which a rank reads its own, as of any other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_megatron.checkpoints.files.adapters import TensorToWrite
from lightning_megatron.checkpoints.files.sources import Source, open_source
from lightning_megatron.checkpoints.files.storage import Place

_Group = dict[str | None, list[str]]
_Piece = tuple[tuple[int, ...], tuple[int, ...], Place]  # offset, shape, and where it lies


def open_weights(path: Any) -> Source:
    """Open a checkpoint of any format, for a module: with the names and shapes that tensors have there.

    Args:
        path: as :func:`~.sources.open_source` takes it.
    """
    return in_module(open_source(path))


def in_module(source: Source) -> Source:
    """The same tensors by the names and shapes that they have in the module, if these are a Hugging Face model's.

    Args:
        source: opened; changed only where it is a folder whose ``config.json`` names a class of ``transformers``.
    """
    model = _model(source.about.get("huggingface", {}).get("")) if source.kind == "safetensors" else None
    if model is None:
        return source
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    groups: dict[str, _Group] = {}
    for stored in sorted(source.kinds, key=_numbers_by_value):
        name, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, shapes)
        if name != stored and stored not in shapes:
            groups.setdefault(name, {}).setdefault(pattern, []).append(stored)
    tensors, places = dict(source.metadata.state_dict_metadata), dict(source.metadata.storage_data)
    for name, group in groups.items():
        converter = next((each for each in converters if set(group) <= set(each.source_patterns)), None)
        made = dict(_put_together(source, name, group, converter))
        if made and all(shapes.get(each) == entry[0] for each, entry in made.items()):
            for stored in (each for names in group.values() for each in names):
                dtype = tensors.pop(stored).properties.dtype  # type: ignore[union-attr]
                del places[stored]
            for each, (shape, pieces) in made.items():
                boxes = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size, _ in pieces]
                tensors[each] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), boxes)
                places[each] = [place for *_, place in pieces]
    return replace(source, metadata=Metadata(tensors, storage_data=places))


def as_in_files(entries: Mapping[str, TensorToWrite], config: Mapping[str, Any] | None) -> dict[str, TensorToWrite]:
    """Tensors to write by the names and in the shapes that ``save_pretrained`` gives them.

    Args:
        entries: by their names in a Hugging Face model.
        config: content of its ``config.json``.
    """
    model = _model(config)
    if model is None:
        return dict(entries)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    table = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [entry for entry in table if not isinstance(entry, PrefixChange)]
    revert = partial(revert_weight_conversion, model)
    metas = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in entries.items()}
    written: dict[str, TensorToWrite] = {}
    for names in _together(metas, revert):
        made = revert({name: metas[name] for name in names})
        if list(made) == list(names):
            written |= {name: entries[name] for name in names}
            continue
        group = _Apart({name: entries[name] for name in names}, revert)
        for name, meta in made.items():
            written[name] = TensorToWrite(tuple(meta.shape), meta.dtype, partial(group.read, name))
    return written


class _Apart:
    """Tensors of the module that are others in a file; those of one group are made together, and held until the last.

    Args:
        entries: the tensors.
        revert: gives what they are in a file.
    """

    def __init__(self, entries: Mapping[str, TensorToWrite], revert: Any) -> None:
        self._entries, self._revert = entries, revert
        self._made: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """Read a tensor of the file to be written, by its name there."""
        if name not in self._made:
            self._made = self._revert({key: entry.read().to(entry.dtype) for key, entry in self._entries.items()})
        return self._made.pop(name)


def _together(metas: Mapping[str, Tensor], revert: Any) -> Iterator[list[str]]:
    """Names of tensors that become tensors of a file together, mostly one at a time."""
    whole = revert(dict(metas))
    groups: dict[str, list[str]] = {}
    for name, meta in metas.items():
        first = name if name in whole else next(iter(revert({name: meta})))
        groups.setdefault(first, []).append(name)
    yield from groups.values()


def _put_together(
    source: Source, name: str, group: _Group, converter: Any
) -> Iterator[tuple[str, tuple[tuple[int, ...], list[_Piece]]]]:
    """Tensors of the module that a group of stored ones makes: name, shape and pieces; none where it is not known."""
    operations = [(type(each).__name__, getattr(each, "dim", 0)) for each in getattr(converter, "operations", ())]
    if any(len(source.metadata.storage_data[each]) != 1 for names in group.values() for each in names):
        return
    if converter is None and [*group] == [None] and len(group[None]) == 1:
        operations = [("Concatenate", 0)]
    if operations == [("Chunk", 0)]:
        yield from _chunks(source, name, group, converter.target_patterns)
        return
    rows = [
        [_piece(source, stored) for stored in names]
        for _, names in sorted(group.items(), key=lambda item: _place_in(converter, item[0]))
    ]
    if operations[:1] == [("MergeModulelist", 0)]:
        rows = [_stacked(row) for row in rows]
        operations = operations[1:] or ([("Concatenate", 0)] if len(rows) == 1 else [])
    elif len(operations) != 1 or any(len(row) != 1 for row in rows):
        return
    if len(operations) == 1 and operations[0][0] == "Concatenate":
        yield name, _beside(rows, operations[0][1])


def _place_in(converter: Any, pattern: str | None) -> int:
    return 0 if pattern is None else list(converter.source_patterns).index(pattern)


def _piece(source: Source, stored: str) -> _Piece:
    shape, _ = source.kinds[stored]
    (place,) = source.metadata.storage_data[stored]
    return (0,) * len(shape), tuple(shape), place


def _stacked(row: list[_Piece]) -> list[_Piece]:
    return [((number, *at), (1, *shape), place) for number, (at, shape, place) in enumerate(row)]


def _beside(rows: list[list[_Piece]], dim: int) -> tuple[tuple[int, ...], list[_Piece]]:
    """Pieces concatenated along a dimension, and their shape."""
    pieces: list[_Piece] = []
    start, whole = 0, tuple[int, ...]()
    for row in rows:
        whole = tuple(max(at[d] + size[d] for at, size, _ in row) for d in range(len(row[0][1])))
        pieces += [((*at[:dim], at[dim] + start, *at[dim + 1 :]), size, place) for at, size, place in row]
        start += whole[dim] if whole else 0
    return ((*whole[:dim], start, *whole[dim + 1 :]) if whole else ()), pieces


def _chunks(
    source: Source, name: str, group: _Group, patterns: Iterable[str]
) -> Iterator[tuple[str, tuple[tuple[int, ...], list[_Piece]]]]:
    """Equal parts of one stored tensor, along its first dimension."""
    first, *others = patterns
    ((stored,),) = group.values()
    at, shape, place = _piece(source, stored)
    names = [name, *(name.replace(first, other, 1) for other in others)]
    if shape[0] % len(names):
        return
    part = (shape[0] // len(names), *shape[1:])
    size = math.prod(part) * source.kinds[stored][1].itemsize
    for number, each in enumerate(names):
        yield each, (part, [(at, part, Place(place.file, place.start + number * size))])


def _numbers_by_value(name: str) -> list[Any]:
    """Sort key that puts expert 10 after expert 9."""
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", name)]


def _model(config: Mapping[str, Any] | None) -> Any:
    """The model of a config without memory; ``None`` if no class of ``transformers`` has names of its own there."""
    kinds = (config or {}).get("architectures") or []
    if config is None or not kinds:
        return None
    try:
        import transformers
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:  # not installed, or a version whose names in files are those of the module
        return None
    kind = getattr(transformers, str(kinds[0]), None)
    known = [str(kinds[0]), *_types(config)]
    if kind is None or not any(get_checkpoint_conversion_mapping(each) for each in known):
        return None
    options = {key: _with_infinities(value) for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        return kind(transformers.AutoConfig.for_model(config["model_type"], **options))


def _with_infinities(value: Any) -> Any:
    """An entry of a ``config.json`` with numbers where ``transformers`` writes ``{"__float__": "Infinity"}``."""
    if isinstance(value, Mapping):
        if list(value) == ["__float__"]:
            return float(value["__float__"])
        return {key: _with_infinities(entry) for key, entry in value.items()}
    return [_with_infinities(entry) for entry in value] if isinstance(value, list) else value


def _types(config: Mapping[str, Any]) -> Iterator[str]:
    """Types of the model and of those inside of it."""
    if isinstance(config.get("model_type"), str):
        yield config["model_type"]
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _types(value)
