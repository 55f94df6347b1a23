"""Flags of the parameters of other stages, for steps that ask what is trained.

A hook that unfreezes layers goes over those of its own stage, and a step that goes by it runs on the last one::

    if any(p.requires_grad for p in self.backbone.parameters()):
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step, names_in


class FrozenElsewhere:
    """Tells the stages of a pipeline of each other's flags.

    Args:
        module: the user's, cut.
        presence: what of it is here.
        group: the stages.
        device: where tensors live.
    """

    def __init__(
        self, module: pl.LightningModule, presence: Presence, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._module, self._device, self._group = module, device, group
        self._presence, self._stage = presence, presence.stage
        entries = presence.entries.values()
        self._parameters = {entry.first: entry for entry in entries if isinstance(entry.twin, nn.Parameter)}
        self._asks: bool | None = None

    def share(self) -> None:
        """Before a training step; collective over the stages where its code mentions flags."""
        if self._asks is None:
            mentioned = any("requires_grad" in names_in(each.__code__)[0] for each in functions_of_step(self._module))
            self._asks = any(objects.gather(mentioned, self._group))
        if not self._asks:
            return
        own = type(self._module).named_parameters(self._module, remove_duplicate=False)
        places = self._presence.entries
        trained = {places[name].first for name, tensor in own if name in places and tensor.requires_grad}
        flags = torch.tensor([int(name in trained) for name in self._parameters], device=self._device)
        told = raw_all_reduce(flags, self._group, keep=False, maximum=True).tolist()
        for entry, flag in zip(self._parameters.values(), told, strict=True):
            if self._stage not in entry.stages and entry.twin.requires_grad != bool(flag):
                entry.twin.requires_grad_(bool(flag))
