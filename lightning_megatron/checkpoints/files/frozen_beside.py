"""A checkpoint of an adapter that leaves out the frozen weights, and the folder that has them, as one checkpoint::

checkpoint   q_proj.lora_A.default.weight  q_proj.lora_B.default.weight
folder       q_proj.weight                 norm.weight
both         q_proj.base_layer.weight      norm.weight                    and the adapter's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoints.files.adapters import Adapter, Tensors
from lightning_megatron.checkpoints.files.sources import Source
from lightning_megatron.mesh.parts.names import Parts, leaf_of, parent

_SAVED = ".modules_to_save."


class WithFrozen:
    """The tensors of an adapted model, those that train from a checkpoint and the others from a folder.

    Args:
        trained: an opened checkpoint.
        frozen: the model alone, by the names of its module.
        prefix: start of the names of the model inside the adapted one.
        adapters: of the checkpoint.

    Raises:
        ValueError: the folder lacks a weight that is adapted, or has it in another shape.
    """

    def __init__(self, trained: Tensors, frozen: Source, prefix: str, adapters: Sequence[Adapter]) -> None:
        self._trained, self._frozen = trained, frozen
        adapted = {module for adapter in adapters for module in adapter.updates or {}}
        copied = {name.partition(_SAVED)[0] for name in (*trained.kinds, *trained.aliases) if _SAVED in name}
        inside = {_inside(f"{prefix}{name}", adapted, copied): name for name in frozen.kinds}
        self._names = {full: name for full, name in inside.items() if full not in trained.kinds}
        for adapter in adapters:
            self._check(adapter)

    @property
    def about(self) -> Mapping[str, Any]:
        """The checkpoint's description of itself."""
        return self._trained.about

    @property
    def kinds(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each tensor, by name."""
        return {full: self._frozen.kinds[name] for full, name in self._names.items()} | dict(self._trained.kinds)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors -> the name they are stored under; not of what the folder stores itself."""
        return {name: stored for name, stored in self._trained.aliases.items() if name not in self._names}

    def read(self, name: str) -> Tensor:
        """One tensor in full, on the CPU."""
        return self._frozen.read(self._names[name]) if name in self._names else self._trained.read(name)

    def _check(self, adapter: Adapter) -> None:
        kinds, aliases = self.kinds, self.aliases
        for module, how in (adapter.updates or {}).items():
            weight = f"{module}base_layer.weight"
            stored = kinds.get(aliases.get(weight, weight))
            if stored is None:
                raise ValueError(
                    f"`--base` has no `{weight.replace('.base_layer.', '.')}`, which adapter {adapter.name!r} is added "
                    "to; give the folder of the model that the adapter was trained on."
                )
            rows, columns = (self._size(module, adapter.name, half, dim) for half, dim in (("B", 0), ("A", 1)))
            wanted = (columns, rows) if how["transposed"] or self._embeds(module, adapter.name) else (rows, columns)
            if tuple(stored[0]) != wanted:
                raise ValueError(
                    f"`--base` has `{weight.replace('.base_layer.', '.')}` of shape {tuple(stored[0])}, and adapter "
                    f"{adapter.name!r} is for {wanted}; give the folder of the model that it was trained on."
                )

    def _embeds(self, module: str, adapter: str) -> bool:
        return any(f"{module}lora_embedding_A.{adapter}" in names for names in (self.kinds, self.aliases))

    def _size(self, module: str, adapter: str, half: str, dim: int) -> int:
        form = "lora_embedding_{}.{}" if self._embeds(module, adapter) else "lora_{}.{}.weight"
        name = module + form.format(half, adapter)
        return int(self.kinds[self.aliases.get(name, name)][0][dim])


def _inside(name: str, adapted: set[str], copied: set[str]) -> str:
    """The name that a tensor of the model alone has in the adapted one."""
    module = parent(name)
    if f"{module}." in adapted:
        return f"{module}.base_layer.{leaf_of(name)}"
    holder = Parts(copied).of(name)
    return name if holder is None else f"{holder}.original_module{name.removeprefix(holder)}"
