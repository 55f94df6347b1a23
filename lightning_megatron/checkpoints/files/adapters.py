"""Adapters of a checkpoint, and what is written of one alone, as peft stores it; `merging` adds one to the weights.

A checkpoint notes which of its tensors belong to an adapter (``about["adapters"]``), so that neither needs the module
or peft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoints.files.sources import Source


@dataclass(frozen=True)
class TensorToWrite:
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


def adapter_entries(source: Source, adapter: Adapter, dtype: torch.dtype | None = None) -> dict[str, TensorToWrite]:
    """The tensors of an adapter by their names in ``adapter_model.safetensors``.

    Raises:
        ValueError: peft computes what it stores of this kind of adapter.
    """
    if adapter.tensors is None:
        raise ValueError(
            f"adapter {adapter.name!r} is of the kind {adapter.config.get('peft_type')}, of which peft stores what it "
            "computes from the weights; load the checkpoint into the module and call its `save_pretrained`."
        )
    names = {name: source.aliases.get(stored, stored) for name, stored in adapter.tensors.items()}
    # buffers that are in no state are in no file of peft's either
    return {name: stored_entry(source, stored, dtype) for name, stored in names.items() if stored in source.kinds}


def stored_entry(source: Source, name: str, dtype: torch.dtype | None) -> TensorToWrite:
    """A tensor as the checkpoint has it, or in another type if it has floating-point numbers."""
    shape, kind = source.kinds[name]
    wanted = dtype if dtype is not None and kind.is_floating_point else kind
    return TensorToWrite(tuple(shape), wanted, lambda: source.read(name))
