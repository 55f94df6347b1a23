"""Values that callbacks collect of batches by themselves, which over replicas are of their own samples.

A callback may keep outputs in its own hook, and make something of them after the loop::

    def on_validation_batch_end(self, trainer, pl_module, outputs, ...):    def on_validation_epoch_end(self, ...):
        self.scores.append(outputs["scores"])                                   pl_module.log("auc", auc(self.scores))

No trial runs such hooks: they may write files, or draw pictures. What a step keeps for hooks comes together
(:mod:`.kept`); of this, replicas compare what they have, and the user is told where it is not the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_megatron.strategy.evaluation.reading_hooks import names_collected
from lightning_megatron.strategy.lightning.hooks import foreign_callbacks
from lightning_megatron.strategy.loss.over_replicas import unlike_values
from lightning_megatron.strategy.loss.tables import Name

_LOOPS = ("train", "validation", "test")
_KEEPS = {loop: f"keep it in `{loop}_step` on the module, " for loop in _LOOPS[1:]}  # which comes together


class Collected:
    """Compares over the replicas what callbacks have collected.

    Args:
        callbacks: of the Trainer.
        module: the user's.
        group: the replicas.
    """

    def __init__(self, callbacks: Iterable[Callback], module: pl.LightningModule, group: dist.ProcessGroup) -> None:
        others = [*enumerate(foreign_callbacks(callbacks))]
        self._group, self._told = group, set[Name]()
        self._read = {
            loop: [(at, each, names) for at, each in others if (names := names_collected(each, module, loop))]
            for loop in _LOOPS
        }

    def compare(self, loop: str) -> None:
        """After the last batch of a loop, before callbacks see it; collective over the replicas.

        Args:
            loop: ``train``, ``validation`` or ``test``.
        """
        if not self._read[loop]:
            return
        values: dict[Name, list[Any]] = {}
        kinds = {}
        for at, callback, names in self._read[loop]:
            kinds[str(at)] = type(callback).__name__
            values.update({(str(at), name): [vars(callback)[name]] for name in names & vars(callback).keys()})
        found = [each for each in unlike_values(values, self._group) if each not in self._told]
        self._told.update(found)
        if found:
            keeps = _KEEPS.get(loop, "")
            said = ", ".join(f"`{kinds[at]}.{name}`" for at, name in found)
            rank_zero_warn(
                f"callbacks collect {said} in `on_{loop}_batch_end` from the samples of each of the "
                f"{self._group.size()} replicas, where one process collects those of all: the hooks after the loop "
                f"see those of their replica. Gather what they need (`trainer.strategy.all_gather`), {keeps}"
                "use a torchmetrics object, or pass `whole_batch_loss=False` if each replica's own is meant."
            )
