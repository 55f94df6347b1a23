"""``MegatronStrategy.save_adapter``: a peft adapter alone, without the model that it adapts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.checkpoints.files.adapters import Adapter, choose_adapter
from lightning_megatron.checkpoints.files.exporting import export_adapter
from lightning_megatron.mesh.messages import objects
from lightning_megatron.strategy.saving.adapter_notes import adapter_notes


@dataclass(frozen=True)
class _Held:
    """Some tensors in memory, as if they were a checkpoint's.

    Attributes:
        about: what a checkpoint says of itself.
        tensors: by name.
        aliases: none: each tensor is here under the name that it is asked for.
    """

    about: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def kinds(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype by name."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """One of them."""
        return self.tensors[name]


def save_adapter(strategy: Any, folder: str | Path, adapter: str | None = None) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json``, which ``PeftModel.from_pretrained`` loads.

    Collective over all ranks; in hooks, callbacks, and after training. Only the adapter's tensors are gathered.

    Args:
        strategy: whose module has been set up.
        folder: to write into, by global rank 0; created if it does not exist.
        adapter: its name; by default the only one.

    Raises:
        ValueError: there is no such adapter, or peft computes what it stores of this kind; on every rank.
    """
    weights, mesh = strategy.run.saving.weights, strategy.mesh
    chosen, trouble = objects.broadcast(_chosen(weights, adapter) if mesh.rank == 0 else None)
    if chosen is None:
        raise ValueError(trouble)
    encoder = f"{chosen.start}prompt_encoder.{chosen.name}."
    wanted = set((chosen.tensors or {}).values())
    tensors = strategy.run.whole_state(lambda name: name in wanted or name.startswith(encoder))
    if mesh.rank == 0:
        notes = {chosen.start: {chosen.name: {"config": chosen.config, "tensors": chosen.tensors, "updates": None}}}
        export_adapter(_Held({"adapters": notes}, tensors), Path(folder), adapter=chosen.name)
    strategy.barrier()


def _chosen(weights: Any, name: str | None) -> tuple[Adapter | None, str]:
    """The adapter, or what is wrong."""
    try:
        return choose_adapter(_Held({"adapters": adapter_notes(weights.module, weights.names)}), name), ""
    except ValueError as error:
        return None, str(error)
