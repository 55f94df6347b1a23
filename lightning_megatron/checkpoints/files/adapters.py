"""Adapters of a checkpoint, and what is written of one alone, as peft stores it; `merging` adds one to the weights.

A checkpoint notes which of its tensors belong to an adapter (``about["adapters"]``), so that neither needs the module
or peft.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron.mesh.parts.names import parent


class Tensors(Protocol):
    """Source of the tensors of adapters: a checkpoint, or a module."""

    @property
    def about(self) -> Mapping[str, Any]:
        """The checkpoint's description of itself."""

    @property
    def kinds(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each tensor, by name."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors -> the name they are stored under."""

    def read(self, name: str) -> Tensor:
        """One tensor in full, on the CPU."""


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


def adapters_of(source: Tensors, start: str = "") -> Iterator[Adapter]:
    """Adapters of models whose names, or the names of what they hold, begin with ``start``."""
    for model, adapters in source.about.get("adapters", {}).items():
        if model.startswith(start) or start.startswith(model):
            for name, note in adapters.items():
                yield Adapter(name, model, note["config"], note["tensors"], note["updates"])


def choose_adapter(source: Tensors, name: str | None = None, start: str = "") -> Adapter:
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


def choose_weighted(source: Tensors, names: Sequence[str], start: str = "") -> list[tuple[Adapter, float]]:
    """The adapters called ``names``, or the only one, each with what its update is multiplied by.

    Args:
        source: an opened checkpoint, or the like.
        names: ``name`` or ``name=factor``; an adapter of the whole name comes first.
        start: see :func:`adapters_of`.

    Raises:
        ValueError: an adapter is missing or named twice, or a factor is not a number.
    """
    known = {adapter.name for adapter in adapters_of(source, start)}
    asked: list[tuple[str | None, float]] = [_named(given, known) for given in names]
    found = [(choose_adapter(source, name, start), weight) for name, weight in asked or [(None, 1.0)]]
    given = [adapter.name for adapter, _ in found]
    twice = [name for name in given if given.count(name) > 1]
    if twice:
        raise ValueError(f"`--adapter {twice[0]}` is given twice.")
    return found


def _named(given: str, known: Collection[str]) -> tuple[str, float]:
    """An adapter's name, and the factor behind it."""
    name, sign, factor = given.rpartition("=")
    if given in known or not sign:
        return given, 1.0
    try:
        return name, float(factor)
    except ValueError:
        raise ValueError(f"`--adapter {given}`: {factor!r} is no number.") from None


def adapter_entries(source: Tensors, adapter: Adapter, dtype: torch.dtype | None = None) -> dict[str, TensorToWrite]:
    """The tensors of an adapter by their names in ``adapter_model.safetensors``."""
    names = {name: source.aliases.get(stored, stored) for name, stored in (adapter.tensors or {}).items()}
    # buffers that are in no state are in no file of peft's either
    found = {name: stored_entry(source, stored, dtype) for name, stored in names.items() if stored in source.kinds}
    for name, kept in _kept_ranks(adapter).items():
        for half, dim in (("lora_E", 0), ("lora_A", 0), ("lora_B", 1)):
            found[f"{name}.{half}"] = _some_of(found[f"{name}.{half}"], kept, dim)
    return found


def stored_config(adapter: Adapter) -> Mapping[str, Any]:
    """The content of ``adapter_config.json``."""
    ranks = adapter.config.get("rank_pattern")
    if adapter.config.get("peft_type") != "ADALORA" or not ranks:
        return adapter.config
    return {**adapter.config, "rank_pattern": {_without(name, adapter.name): kept for name, kept in ranks.items()}}


def _kept_ranks(adapter: Adapter) -> dict[str, list[bool]]:
    """By name of a layer in a peft file, the ranks of it that AdaLoRA has kept (Zhang et al., arXiv 2303.10512)."""
    ranks = stored_config(adapter).get("rank_pattern") if adapter.config.get("peft_type") == "ADALORA" else None
    return {f"base_model.model.{parent(name)}": kept for name, kept in (ranks or {}).items()}


def _without(name: str, adapter: str) -> str:
    return name.removesuffix(f".{adapter}")


def _some_of(entry: TensorToWrite, kept: Sequence[bool], dim: int) -> TensorToWrite:
    """Some slices of a tensor."""
    at = torch.tensor([place for place, stays in enumerate(kept) if stays], dtype=torch.long)
    shape = (*entry.shape[:dim], len(at), *entry.shape[dim + 1 :])
    return TensorToWrite(shape, entry.dtype, lambda: entry.read().index_select(dim, at))


def stored_entry(source: Tensors, name: str, dtype: torch.dtype | None) -> TensorToWrite:
    """A tensor as the checkpoint has it, or in another type if it has floating-point numbers."""
    shape, kind = source.kinds[name]
    wanted = dtype if dtype is not None and kind.is_floating_point else kind
    return TensorToWrite(tuple(shape), wanted, lambda: source.read(name))
