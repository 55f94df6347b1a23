"""A small stand-in for a module on the meta device.

A plan is made by running the module on a tiny input. A module on the meta device cannot be run, and two of a hundred
equal layers are enough. Of every list of layers, the stand-in keeps the first of each kind and one that represents its
repetitions. It has random weights on the CPU, and a mapping from its names to those of the module::

    module    layers.0  layers.1  layers.2 ... layers.31
    stand-in  layers.0  layers.1 (stands for 1 to 31)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.parallelize.reading.copy import copy_of

VOCABULARY = 32768
"""A matrix with at least this many rows counts as a table of a vocabulary."""

Rename = Callable[[str], str]


@dataclass(frozen=True)
class Study:
    """The module for which a plan is made, and the mapping of its names to the user's module.

    Attributes:
        module: the user's module if it has weights, otherwise a stand-in for it. It is copied, never run.
        kept: name of each shortened list -> for each of its layers, the original indices that it represents.
    """

    module: nn.Module
    kept: Mapping[str, tuple[tuple[int, ...], ...]]

    def originals(self, name: str) -> list[str]:
        """Names in the user's module that ``name`` represents."""
        return [rename(name) for rename in self.renames(name)]

    def renames(self, name: str) -> list[Rename]:
        """One function per original layer that the layer of ``name`` represents: it maps names to the original."""
        place = self._place(name)
        if place is None:
            return [lambda other: other]
        return [self._rename(place[0], place[1], original) for original in self.kept[place[0]][place[1]]]

    def _rename(self, prefix: str, index: int, original: int) -> Rename:
        def rename(name: str) -> str:
            place = self._place(name)
            if place is None:
                return name
            number = original if place[:2] == (prefix, index) else self.kept[place[0]][place[1]][0]
            return ".".join(part for part in (place[0], str(number), place[2]) if part)

        return rename

    def list_across(self, names: Iterable[str]) -> str | None:
        """The shortened list of which ``names`` lie in several layers, so that one cannot stand for others."""
        places = [place for name in names if (place := self._place(name)) is not None]
        return next((place[0] for place in places if any(o[0] == place[0] and o[1] != place[1] for o in places)), None)

    def _place(self, name: str) -> tuple[str, int, str] | None:
        """The shortened list that contains ``name``, the index in it, and the rest of the name; else None."""
        for prefix in self.kept:
            start = f"{prefix}." if prefix else ""
            index, _, rest = name[len(start) :].partition(".")
            if name.startswith(start) and index.isdigit():
                return prefix, int(index), rest
        return None


def study_of(module: nn.Module, plan: str | Mapping[str, str] = "auto", whole: Collection[str] = ()) -> Study:
    """The module itself, or a copy with random weights if parameters are on the meta device.

    The lists of the copy are shortened, but for those called ``whole``, and unless the plan names layers by number.
    """
    if not any(parameter.is_meta for parameter in module.parameters()):
        return Study(module, {})
    stand_in = copy_of(module)
    kept: dict[str, tuple[tuple[int, ...], ...]] = {}
    numbered = not isinstance(plan, str) and any(part.isdigit() for p in plan for part in p.split("."))
    for name, part in [] if numbered else list(stand_in.named_modules()):
        nested = name in Parts(kept)
        if isinstance(part, nn.ModuleList) and len(part) > 2 and not nested and name not in whole:
            kept[name] = _shorten(part)
    _materialise(stand_in)
    return Study(stand_in, kept)


def _shorten(layers: nn.ModuleList) -> tuple[tuple[int, ...], ...]:
    """Keep the first layer of each kind and one for its repetitions; return the indices that each represents."""
    groups: list[list[int]] = []
    kinds: dict[Any, list[int]] = {}
    for index, layer in enumerate(layers):
        kind = (type(layer), tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()))
        seen = kinds.setdefault(kind, [])
        if len(seen) < 2:
            seen.append(len(groups))
            groups.append([index])
        else:
            groups[seen[1]].append(index)
    chosen = [layers[group[0]] for group in groups]
    del layers[:]
    layers.extend(chosen)
    return tuple(tuple(group) for group in groups)


def _materialise(module: nn.Module) -> None:
    """Replace meta tensors by random values on the CPU, the same on every rank; tied tensors stay tied."""
    generator = torch.Generator().manual_seed(11)
    made: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            values = _values(tensor, generator)
            made[id(tensor)] = (
                nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
            )
        return made[id(tensor)]

    for part in module.modules():
        tables: list[Any] = [part._parameters, part._buffers, vars(part)]
        for table in tables:
            for key, value in list(table.items()):
                if isinstance(value, Tensor) and value.is_meta:
                    table[key] = real(value)


def _values(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Random values: of the usual scale for matrices, near one for vectors; True for booleans, zero for integers.

    Tables of a vocabulary are one row, expanded, to save memory: trials do not compare them.
    """
    if not tensor.is_floating_point():
        return torch.full(tensor.shape, tensor.dtype == torch.bool, dtype=tensor.dtype)
    if tensor.ndim == 2 and tensor.shape[0] >= VOCABULARY:
        row = torch.randn(1, tensor.shape[1], generator=generator) / tensor.shape[1] ** 0.5
        return row.to(tensor.dtype).expand(tensor.shape)
    values = torch.randn(tensor.shape, generator=generator)
    scaled = 1 + 0.1 * values if tensor.ndim < 2 else values / tensor.shape[-1] ** 0.5
    return scaled.to(tensor.dtype)
