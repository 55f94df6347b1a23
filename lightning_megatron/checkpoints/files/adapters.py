"""Adapters of a checkpoint: written alone, as peft stores them, or added to the weights that they adapt.

A checkpoint notes which of its tensors belong to an adapter (``about["adapters"]``), so that neither needs the module
or peft. Merging holds one weight and its update in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoints.files.sources import Source
from lightning_megatron.checkpoints.state.stored import optimizer_names


@dataclass(frozen=True)
class Entry:
    """A tensor of a file to write.

    Attributes:
        shape: its shape.
        dtype: its type in the file.
        read: gives it, on the CPU, in whatever type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Adapter:
    """An adapter of a checkpoint.

    Attributes:
        name: its name in the module.
        start: start of the names of the model that it adapts.
        config: content of ``adapter_config.json``.
        tensors: name in a file of peft -> name in the checkpoint; ``None`` where peft computes what it stores.
        updates: name of an adapted module, with a dot -> how its update is added; ``None`` if it cannot be.
    """

    name: str
    start: str
    config: Mapping[str, Any]
    tensors: Mapping[str, str] | None
    updates: Mapping[str, Mapping[str, Any]] | None


def adapters_of(source: Source, start: str = "") -> Iterator[Adapter]:
    """Adapters of models whose names, or the names of what they hold, begin with ``start``."""
    for model, adapters in source.about.get("adapters", {}).items():
        if model.startswith(start) or start.startswith(model):
            for name, note in adapters.items():
                yield Adapter(name, model, note["config"], note["tensors"], note["updates"])


def choose_adapter(source: Source, name: str | None = None, start: str = "") -> Adapter:
    """The adapter called ``name``, or the only one.

    Raises:
        ValueError: there is none, or not one alone.
    """
    found = list(adapters_of(source, start))
    chosen = [adapter for adapter in found if name in (None, adapter.name)]
    if len(chosen) != 1:
        names = ", ".join(f"{adapter.start}: {adapter.name}" for adapter in found) or "none"
        raise ValueError(f"the checkpoint holds these adapters: {names}; name one of them with `--adapter`.")
    return chosen[0]


def adapter_entries(source: Source, adapter: Adapter, dtype: torch.dtype | None = None) -> dict[str, Entry]:
    """The tensors of an adapter by their names in ``adapter_model.safetensors``.

    Raises:
        ValueError: peft computes what it stores of this kind of adapter.
    """
    if adapter.tensors is None:
        raise ValueError(
            f"adapter {adapter.name!r} is of the kind {adapter.config.get('peft_type')}, of which peft stores what it "
            "computes from the weights; load the checkpoint into the module and call its `save_pretrained`."
        )
    return {name: stored_entry(source, stored, dtype) for name, stored in adapter.tensors.items()}


def merged_entries(source: Source, adapter: Adapter, prefix: str, dtype: torch.dtype | None) -> dict[str, Entry]:
    """The tensors of the adapted model with the adapter added to them, by the names that the model alone has.

    Low-rank updates follow Hu et al., arXiv 2106.09685, eq. 3, and Liu et al., arXiv 2402.09353, eq. 5.

    Args:
        source: an opened checkpoint.
        adapter: one of its adapters.
        prefix: start of the names of the model inside the adapted one; it is taken off.
        dtype: of floating-point tensors in the file; as stored by default.

    Raises:
        ValueError: the adapter's update is no product of two matrices.
    """
    if adapter.updates is None:
        raise ValueError(
            f"adapter {adapter.name!r} ({adapter.config.get('peft_type')}) cannot be added to the weights here; write "
            "it alone with `--format adapter`, and merge it with peft's `merge_and_unload`."
        )
    entries: dict[str, Entry] = {}
    kept = {name for name in source.kinds if f".modules_to_save.{adapter.name}." in name}
    replaced = tuple(f"{name.partition('.modules_to_save.')[0]}.original_module." for name in kept)
    optimizers = {stored for stored, *_ in optimizer_names(source.kinds)}
    for name in source.kinds:
        if not name.startswith(prefix) or name in optimizers:
            continue
        module = next((module for module in adapter.updates if name.startswith(module)), None)
        plain = name.removeprefix(prefix)
        if name in kept:
            entries[plain.replace(f".modules_to_save.{adapter.name}", "")] = stored_entry(source, name, dtype)
        elif module is None and ".modules_to_save." not in name and not name.startswith(replaced):
            entries[plain.replace(".original_module", "")] = stored_entry(source, name, dtype)
        elif module is not None and name == f"{module}base_layer.weight":
            how = adapter.updates[module]
            entry = stored_entry(source, name, dtype)
            read = _Merge(source, module, adapter.name, how)
            entries[plain.replace(".base_layer", "")] = Entry(entry.shape, entry.dtype, read)
        elif module is not None and name.startswith(f"{module}base_layer."):
            entries[plain.replace(".base_layer", "")] = stored_entry(source, name, dtype)
    return entries


def stored_entry(source: Source, name: str, dtype: torch.dtype | None) -> Entry:
    """A tensor as the checkpoint has it, or in another type if it has floating-point numbers."""
    shape, kind = source.kinds[name]
    wanted = dtype if dtype is not None and kind.is_floating_point else kind
    return Entry(tuple(shape), wanted, lambda: source.read(name))


@dataclass(frozen=True)
class _Merge:
    """Reads a weight with an update added, computed in float32, or float64 for weights in it."""

    source: Source
    module: str
    adapter: str
    how: Mapping[str, Any]

    def __call__(self) -> Tensor:
        weight = self._read("base_layer.weight")
        embedding = f"{self.module}lora_embedding_A.{self.adapter}" in self.source.kinds
        kind = "lora_embedding_{}." if embedding else "lora_{}."
        down, up = (self._read(f"{kind.format(half)}{self.adapter}{'' if embedding else '.weight'}") for half in "AB")
        update = self.how["scale"] * (up @ down)
        if embedding or self.how["transposed"]:
            update = update.T
        merged = weight + update
        if self.how["magnitude"]:
            rows = 0 if self.how["transposed"] else 1
            magnitude = self._read(f"lora_magnitude_vector.{self.adapter}.weight").reshape(-1).unsqueeze(rows)
            merged = merged * magnitude / merged.norm(dim=rows, keepdim=True)
        return merged

    def _read(self, name: str) -> Tensor:
        tensor = self.source.read(f"{self.module}{name}")
        return tensor if tensor.dtype is torch.float64 else tensor.float()
