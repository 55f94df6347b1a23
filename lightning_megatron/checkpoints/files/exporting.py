"""Exports a checkpoint to one Lightning file or to Hugging Face safetensors, with one tensor in memory at a time.

For a Lightning file, ``torch.save`` writes fake tensors, which reserves space for their elements. The elements are then
written into this space tensor by tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from lightning_megatron.checkpoints.files.adapters import (
    Tensors,
    TensorToWrite,
    adapter_entries,
    adapters_of,
    choose_adapter,
    choose_weighted,
    stored_config,
    stored_entry,
)
from lightning_megatron.checkpoints.files.dcp_plans import STATE_BESIDE, beside, saved_kinds
from lightning_megatron.checkpoints.files.frozen_beside import WithFrozen
from lightning_megatron.checkpoints.files.library_names import as_in_files
from lightning_megatron.checkpoints.files.merging import merged_entries
from lightning_megatron.checkpoints.files.prompt_encoders import made_by_encoder
from lightning_megatron.checkpoints.files.sources import Source, safetensors_type
from lightning_megatron.checkpoints.files.storage import bytes_of
from lightning_megatron.checkpoints.state.stored import optimizer_names

RUN_STATE = ("replicas", "streams")
"""Entries of ``lightning_megatron`` in a checkpoint that an exported file keeps: random numbers and dataloaders."""
_TIES = "tie_word_embeddings"
_OWN = ("lightning_megatron", "optimizer_groups", "optimizer_values", "state_dict_extra")


def export_lightning(source: Source, path: Path, *, optimizer: bool = True) -> None:
    """Write one ``.ckpt`` that plain Lightning loads, and resumes from.

    Args:
        source: an opened checkpoint.
        path: file to write; it gets this name once it is complete.
        optimizer: whether to write the optimizers' state too; without it, callbacks and schedulers are left out as
            well.

    Raises:
        RuntimeError: objects of callbacks or hyperparameters hold tensors that this export cannot find.
    """
    optimizers = {stored for stored, *_ in optimizer_names(source.kinds)}
    with FakeTensorMode():
        fakes = {
            name: torch.empty(shape, dtype=dtype)
            for name, (shape, dtype) in source.kinds.items()
            if optimizer or name not in optimizers
        }
    content = {key: value for key, value in source.meta.items() if key not in _OWN}
    state: dict[str, Any] = {name: fake for name, fake in fakes.items() if name not in optimizers}
    state |= {alias: fakes[name] for alias, name in source.aliases.items() if name in fakes}
    content = {key: _whole_states(value, source, fakes) for key, value in content.items()}
    content["state_dict"] = state | source.meta.get("state_dict_extra", {})
    if optimizer and "optimizer_groups" in source.meta:
        content["optimizer_states"] = _numbered(source, fakes)
        own = source.meta.get("lightning_megatron", {})
        if kept := {key: own[key] for key in RUN_STATE if key in own}:
            content["lightning_megatron"] = kept
    else:
        content.pop("lr_schedulers", None)
        content.pop("callbacks", None)
    for loop in content.get("loops", {}).values():
        loop.get("state_dict", {}).pop("combined_loader", None)
    part = path.with_name(f".{path.name}.part")
    with skip_data(materialize_fake_tensors=True):
        torch.save(content, part)
    _fill(part, content, {id(fake): name for name, fake in fakes.items()}, source)
    part.rename(path)


def _whole_states(value: Any, source: Source, fakes: dict[str, Tensor]) -> Any:
    """``value`` with states beside the module's in the place of their notes; their tensors are added to ``fakes``."""
    if type(value) is not dict:
        return value
    if STATE_BESIDE not in value:
        return {key: _whole_states(each, source, fakes) for key, each in value.items()}
    start = beside(value[STATE_BESIDE])
    with FakeTensorMode():
        own = {n: torch.empty(*kind[:1], dtype=kind[1]) for n, kind in saved_kinds(source.metadata, start).items()}
    fakes |= own
    state = {name.removeprefix(start): fake for name, fake in own.items()}
    return state | {alias: state[n] for alias, n in source.aliases.items() if n in state} | value["extra"]


def _numbered(source: Source, fakes: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """The optimizers' state dicts with parameters by number, as torch stores them."""
    states: list[dict[str, Any]] = []
    for index, groups in enumerate(source.meta["optimizer_groups"]):
        members = [name for group in groups for name in group["params"]]
        numbers = {name: number for number, name in enumerate(members)}
        numbers |= {f"#{number}": number for number in range(len(members))}  # imported: parameters have no names
        values: dict[str, Any] = next(iter(source.meta.get("optimizer_values", [])[index:]), {})
        state: dict[int, dict[str, Any]] = {numbers[name]: dict(own) for name, own in values.items() if name in numbers}
        for stored, number, parameter, key in optimizer_names(source.kinds):
            if number == index and parameter in numbers:
                state.setdefault(numbers[parameter], {})[key] = fakes[stored]
        numbered = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
        states.append({"state": state, "param_groups": numbered})
    return states


def _fill(path: Path, content: Any, names: Mapping[int, str], source: Source) -> None:
    """Write every tensor's elements into the space that ``torch.save`` has reserved.

    Raises:
        RuntimeError: the file holds tensors that are not in ``content``; it is deleted.
    """
    with FakeTensorMode():
        laid_out = torch.load(path, map_location="cpu", weights_only=False)  # trusted: written just before
    done: set[int] = set()
    with path.open("r+b") as file:
        for original, placed in zip(_tensors(content), _tensors(laid_out), strict=True):
            start = int(placed.untyped_storage()._checkpoint_offset or 0)
            if start not in done:
                done.add(start)
                name = names.get(id(original))
                real = source.read(name) if name is not None else _whole_storage(original)
                file.seek(start)
                file.write(bytes_of(real))
        file.flush()
    reader = torch._C.PyTorchFileReader(str(path))
    rooms = sum(1 for record in reader.get_all_records() if record.startswith("data/"))
    if rooms != len(done):
        path.unlink()
        raise RuntimeError(
            f"{rooms - len(done)} tensors are hidden in objects that the checkpoint keeps (of callbacks or "
            "hyperparameters); export with `--no-optimizer`, which leaves callbacks out."
        )


def _whole_storage(tensor: Tensor) -> Tensor:
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def export_safetensors(
    source: Source,
    folder: Path,
    *,
    prefix: str | None = None,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    shard_bytes: int = 5 * 1024**3,
    merge: bool = False,
    adapters: Sequence[str] = (),
    base: Source | None = None,
) -> list[str]:
    """Write Hugging Face safetensors and their ``config.json``, and ``generation_config.json`` where there is one.

    Args:
        source: an opened checkpoint.
        folder: to write into; created if it does not exist.
        prefix: only tensors whose names start with it are written, without it; by default that of the only Hugging Face
            model in the module.
        dtype: dtype of floating-point tensors; by default as stored.
        config: content of ``config.json``; by default the one stored with the checkpoint.
        shard_bytes: largest size of one file, unless a single tensor is larger.
        merge: add an adapter's update to the weights that it adapts.
        adapters: names of those to merge, one after the other, maybe with a factor (``"name=0.5"``); by default the
            only one.
        base: the model without adapters, by the names of its module, for a checkpoint that leaves its weights out.

    Returns:
        The names of the tensors written, which are those of ``save_pretrained``.

    Raises:
        ValueError: no ``prefix`` is given and the module had no Hugging Face model or several, no name starts with the
            prefix, the model has adapters and ``merge`` is not set, or safetensors does not have a dtype.
    """
    found: dict[str, Any] = source.about.get("huggingface", {})
    if prefix is None:
        if not found:
            raise ValueError(
                "the checkpoint's module holds no Hugging Face model; export to a path that ends in `.ckpt` for one "
                "Lightning file, or name tensors by the start of their names with `--prefix` ('' for all)"
            )
        if len(found) != 1:
            raise ValueError(
                f"the checkpoint's module holds {len(found)} Hugging Face models ({', '.join(sorted(found))}); name "
                "the start of the parameters' names with `--prefix`, for instance `--prefix model.`"
            )
        prefix = next(iter(found))
    config = found.get(prefix) if config is None else config
    if merge:
        chosen = choose_weighted(source, adapters, prefix)
        whole: Tensors = (
            source if base is None else WithFrozen(source, base, prefix, [adapter for adapter, _ in chosen])
        )
        entries, unties = merged_entries(whole, chosen, prefix, dtype)
        config = _untied(config) if unties and config is not None else config
    else:
        entries = _entries(source, prefix, dtype)
    if not entries:
        raise ValueError(
            f"no tensor's name starts with {prefix!r}; `lightning-megatron checkpoint inspect` lists them."
        )
    entries = as_in_files(entries, config)
    folder.mkdir(parents=True, exist_ok=True)
    names = _write_shards(folder, entries, shard_bytes)
    if config is not None:
        stored = dict(config) if dtype is None else {**config, "dtype": str(dtype).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(stored, indent=2))
    generation = source.about.get("generation", {}).get(prefix)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    return names


def _write_shards(folder: Path, entries: Mapping[str, TensorToWrite], shard_bytes: int) -> list[str]:
    """Write tensors into files of limited size, with an index where there are several; returns their sorted names."""
    shards = _shards(entries, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_safetensors(folder / file, {name: entries[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_size, entries.values()))}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return sorted(weight_map)


def export_adapter(
    source: Tensors, folder: Path, *, adapter: str | None = None, dtype: torch.dtype | None = None
) -> list[str]:
    """Write an adapter alone, as peft does: ``adapter_model.safetensors`` and ``adapter_config.json``.

    Args:
        source: an opened checkpoint.
        folder: to write into; created if it does not exist.
        adapter: its name; by default the only one.
        dtype: dtype of floating-point tensors; by default as stored.

    Returns:
        The names of the tensors written.

    Raises:
        ValueError: there is no such adapter, or peft computes what it stores of this kind.
    """
    chosen = choose_adapter(source, adapter)
    computed = chosen.tensors is None
    entries = made_by_encoder(source, chosen, dtype) if computed else adapter_entries(source, chosen, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    _write_safetensors(folder / "adapter_model.safetensors", entries)
    (folder / "adapter_config.json").write_text(json.dumps(stored_config(chosen), indent=2))
    return sorted(entries)


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, and those inside it, of a model whose head is no longer its embedding."""
    inner = {key: _untied(value) for key, value in config.items() if isinstance(value, Mapping) and _TIES in value}
    return {**config, **inner, _TIES: False}


def _entries(source: Source, prefix: str, dtype: torch.dtype | None) -> dict[str, TensorToWrite]:
    held = [adapter.name for adapter in adapters_of(source, prefix) if prefix.startswith(adapter.start)]
    if held:
        raise ValueError(
            f"the model {prefix!r} has adapters ({', '.join(held)}), which its class alone cannot load: merge one "
            "into the weights with `--merge-adapters`, or export it alone with `--format adapter`."
        )
    optimizers = {stored for stored, *_ in optimizer_names(source.kinds)}
    names = [name for name in source.kinds if name.startswith(prefix) and name not in optimizers]
    return {name.removeprefix(prefix): stored_entry(source, name, dtype) for name in names}


def _size(entry: TensorToWrite) -> int:
    return torch.Size(entry.shape).numel() * entry.dtype.itemsize


def _shards(entries: Mapping[str, TensorToWrite], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, entry in entries.items():
        if shards[-1] and used + _size(entry) > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += _size(entry)
    return shards


def _write_safetensors(path: Path, entries: Mapping[str, TensorToWrite]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        start, end = end, end + _size(entry)
        place = {"dtype": safetensors_type(entry.dtype), "shape": list(entry.shape), "data_offsets": [start, end]}
        header[name] = place
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for entry in entries.values():
            file.write(bytes_of(entry.read().to(entry.dtype).contiguous()))
    part.rename(path)
