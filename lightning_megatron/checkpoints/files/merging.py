"""The weights of an adapted model with an adapter added to them, by the names that the model alone has.

A tensor that the model has under two names, as an embedding that is its head too, may be adapted under one of them; it
is two tensors from then on. One weight and its update are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoints.files.adapters import Adapter, Tensors, TensorToWrite, stored_entry
from lightning_megatron.checkpoints.files.prompt_encoders import has_encoder
from lightning_megatron.checkpoints.state.stored import optimizer_names

_HALVES = ("lora_{}.{}.weight", "lora_embedding_{}.{}")
_MAGNITUDE = "lora_magnitude_vector.{}.weight"
_BASE = ".base_layer."
_SAVED = ".modules_to_save."


@dataclass(frozen=True)
class _Origin:
    """Origin of a tensor of the model without adapters.

    Attributes:
        stored: the name that the checkpoint has it under.
        modules: adapters whose updates are added to it, by their places, and start of the names of the adapted module.
    """

    stored: str
    modules: tuple[tuple[int, str], ...] = ()


Weighted = tuple[Adapter, float]
"""An adapter, and what its update is multiplied by."""


def merged_entries(
    source: Tensors, adapters: Sequence[Weighted], prefix: str, dtype: torch.dtype | None
) -> tuple[dict[str, TensorToWrite], bool]:
    """The tensors of the adapted model with adapters added to them, one after the other.

    Low-rank updates follow Hu et al., arXiv 2106.09685, eq. 3, and Liu et al., arXiv 2402.09353, eq. 5.

    Args:
        source: an opened checkpoint.
        adapters: some of its adapters.
        prefix: start of the names of the model inside the adapted one; it is taken off.
        dtype: of floating-point tensors in the file; as stored by default.

    Returns:
        The tensors by the names that the model alone has, and whether two that it ties have become different ones.

    Raises:
        ValueError: the adapter is more than products of two matrices, or more than two tied tensors become different.
    """
    names = _names(source, prefix)
    for adapter, weight in adapters:
        _check(source, adapter, weight)
    origins, bases = _origins(source, [adapter for adapter, _ in adapters], names, prefix)
    apart = [group for group in _tied(bases) if len({origins[plain] for plain in group}) > 1]
    if len(apart) > 1 or any(len(group) > 2 for group in apart):
        raise ValueError(
            f"the model has one tensor under the names {', '.join(apart[0])}, and adapter {adapters[0][0].name!r} "
            "changes some; the model's class alone has no place for what they become. Write the adapter alone with "
            "`--format adapter`."
        )
    entries: dict[str, TensorToWrite] = {}
    written: set[_Origin] = set()
    for plain, origin in origins.items():
        if origin not in written:
            written.add(origin)
            entries[plain] = _entry(source, adapters, origin, dtype)
    return entries, bool(apart)


def _names(source: Tensors, prefix: str) -> dict[str, str]:
    """Names of the model's tensors, those that share a tensor too -> the name that it is stored under."""
    optimizers = {stored for stored, *_ in optimizer_names(source.kinds)}
    names = {name: name for name in source.kinds if name not in optimizers} | dict(source.aliases)
    return {name: stored for name, stored in names.items() if name.startswith(prefix)}


def _check(source: Tensors, adapter: Adapter, weight: float) -> None:
    known = (*(half.format(each, adapter.name) for half in _HALVES for each in "AB"), _MAGNITUDE.format(adapter.name))
    more = [n for n in (adapter.tensors or {}).values() if not n.endswith(known) and _SAVED not in n]
    kind = str(adapter.config.get("peft_type"))
    if adapter.config.get("layer_replication"):
        kind += " with `layer_replication`"
    elif more:
        kind += f" with `{more[0]}`"
    elif adapter.updates is not None:
        _check_base(source, adapter)
        columns = [module for module, how in adapter.updates.items() if how["magnitude"]]
        if weight == 1.0 or not columns:
            return
        kind += f" with the weight {weight:g}, while `{columns[0]}` normalizes columns"
    alone = "write it alone with `--format adapter`"
    if adapter.tensors is None and not has_encoder(adapter):
        alone = "load the checkpoint into the module, write it alone with its `save_pretrained`"
    if why := _unmergeable(source, adapter, more):
        raise ValueError(
            f"adapter {adapter.name!r} ({kind}) {why}, which no weights can take up; leave `--merge-adapters` out, "
            f"{alone}, and load it with peft's `PeftModel`."
        )
    raise ValueError(
        f"adapter {adapter.name!r} ({kind}) cannot be merged into the weights here; {alone}, and merge it with peft's "
        "`merge_and_unload`."
    )


def _check_base(source: Tensors, adapter: Adapter) -> None:
    names = {*source.kinds, *source.aliases}
    missing = [f"{module}base_layer.weight" for module in adapter.updates or {}]
    missing = [name for name in missing if name not in names]
    if missing:
        raise ValueError(
            f"the checkpoint has no `{missing[0]}`, which adapter {adapter.name!r} is added to: it was saved without "
            "the frozen weights. Name the folder that has them with `--base`, or write the adapter alone with "
            "`--format adapter`."
        )


def _unmergeable(source: Tensors, adapter: Adapter, more: list[str]) -> str | None:
    """Why peft cannot merge an adapter either; ``None`` if it can."""
    if "num_virtual_tokens" in adapter.config:
        return "puts learned tokens before the text"
    biases = [name.partition(".lora_B.")[0] for name in more if ".lora_B." in name and name.endswith(".bias")]
    names = {*source.kinds, *source.aliases}
    return next((f"has a bias, and {n} none" for n in biases if f"{n}.base_layer.bias" not in names), None)


def _origins(
    source: Tensors, adapters: Sequence[Adapter], names: Mapping[str, str], prefix: str
) -> tuple[dict[str, _Origin], dict[str, str]]:
    """By the names that the model alone has: where its tensors come from, and which they were before any adapter."""
    changed = {name.rpartition(".lora_")[0] for name in names}
    adapted = tuple({f"{inside}." for name in names if (inside := name.rpartition(_BASE)[0]) in changed - {""}})
    saved = _saved(adapters, names)
    origins, bases = {}, {}
    for name, stored in names.items():
        inside, _, own = name.rpartition(_BASE)
        base = f"{inside}." in adapted
        if _SAVED in name or (not base and name.startswith(adapted)):
            continue
        modules = _updates(source, adapters, f"{inside}.") if base and own == "weight" else ()
        plain = (f"{inside}.{own}" if base else name).removeprefix(prefix).replace(".original_module.", ".")
        origins[plain] = _Origin(names[saved[name]]) if name in saved else _Origin(stored, modules)
        bases[plain] = stored
    return origins, bases


def _saved(adapters: Sequence[Adapter], names: Mapping[str, str]) -> dict[str, str]:
    """Name of a tensor of a module that adapters have copies of -> name of the copy.

    Raises:
        ValueError: two of them have one.
    """
    found: dict[str, str] = {}
    for adapter in adapters:
        mark = f"{_SAVED}{adapter.name}."
        own = {name.replace(mark, ".original_module."): name for name in names if mark in name}
        twice = sorted(found.keys() & own.keys())
        if twice:
            raise ValueError(
                f"several of the adapters have a copy of `{twice[0].replace('.original_module.', '.')}` of their own "
                "(`modules_to_save`), and the model has place for one; name one of them with `--adapter`."
            )
        found |= own
    return found


def _updates(source: Tensors, adapters: Sequence[Adapter], module: str) -> tuple[tuple[int, str], ...]:
    found = ((place, _updated(source, adapter, module)) for place, adapter in enumerate(adapters))
    return tuple((place, name) for place, name in found if name)


def _updated(source: Tensors, adapter: Adapter, module: str) -> str:
    """The name under which a module's update is noted, which may be another one; empty if this adapter has none."""
    updates = adapter.updates or {}
    if module in updates:
        return module
    for half in (half.format("A", adapter.name) for half in _HALVES):
        shared = source.aliases.get(module + half, "").removesuffix(half)
        if shared in updates:
            return shared
    return ""


def _tied(bases: Mapping[str, str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for plain, stored in bases.items():
        groups.setdefault(stored, []).append(plain)
    return [group for group in groups.values() if len(group) > 1]


def _entry(source: Tensors, adapters: Sequence[Weighted], origin: _Origin, dtype: torch.dtype | None) -> TensorToWrite:
    entry = stored_entry(source, origin.stored, dtype)
    read: Callable[[], Tensor] | None = None
    for place, module in origin.modules:
        adapter, weight = adapters[place]
        how = (adapter.updates or {})[module]
        read = _Merge(source, origin.stored, module, adapter.name, how, weight, read)
    return entry if read is None else TensorToWrite(entry.shape, entry.dtype, read)


@dataclass(frozen=True)
class _Merge:
    """Reads a weight with an update added, computed in float32, or float64 for weights in it."""

    source: Tensors
    weight: str
    module: str
    adapter: str
    how: Mapping[str, Any]
    factor: float = 1.0
    before: Callable[[], Tensor] | None = None

    def __call__(self) -> Tensor:
        linear, embedding = _HALVES
        rows = embedding.format("A", self.adapter)
        embeds = any(f"{self.module}{rows}" in names for names in (self.source.kinds, self.source.aliases))
        half = embedding if embeds else linear
        down, up = (self._read(self.module + half.format(each, self.adapter)) for each in "AB")
        update = self.factor * self.how["scale"] * (up @ down)
        inputs_first = embeds or self.how["transposed"]
        weight = self._read(self.weight) if self.before is None else self.before()
        merged = weight + (update.T if inputs_first else update)
        if self.how["magnitude"]:
            inputs = 0 if inputs_first else 1
            magnitude = self._read(self.module + _MAGNITUDE.format(self.adapter)).reshape(-1).unsqueeze(inputs)
            merged = merged * magnitude / merged.norm(dim=inputs, keepdim=True)
        return merged

    def _read(self, name: str) -> Tensor:
        tensor = self.source.read(self.source.aliases.get(name, name))
        return tensor if tensor.dtype is torch.float64 else tensor.float()
