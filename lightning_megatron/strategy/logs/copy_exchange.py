"""Handing round what hooks wrote into copies of trained parts, from the stage that could to the others.

Each stage updates the part of an averaged or momentum copy that it has the source of
(``pipeline.cut.averaged_copies``). Before the copy is used or saved, the stages compare notes: of what
changed on one of them the others get the new value; what changed on several must have changed alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages.collectives import raw_broadcast
from lightning_megatron.mesh.watch import waits
from lightning_megatron.pipeline.stage.stage import Stage

_ALIKE = 1e-5  # relative; copies of a tied weight may differ in their last digits


class CopyExchange:
    """Keeps the copies of one module equal on all stages; does nothing for a module without copies.

    Args:
        stage: says which parts of its module are copies.
        mesh: the grid.
        device: where tensors live.
    """

    def __init__(self, stage: Stage, mesh: ParallelMesh, device: torch.device) -> None:
        self._stage = stage
        self._group, self._ranks = mesh.group("pipeline_parallel"), mesh.pipeline_ranks
        self._device = device
        self._exist = bool(stage.partition.copies)
        self._trained = False
        self._in_question: list[nn.Parameter] = []
        self._notes = self._measure(self._tensors())

    def note_trained(self, parameters: Iterable[nn.Parameter]) -> None:
        """Say that all stages hold equal copies now, and which parameters an optimizer has. Copies among them may be
        trained, which their gradients will tell; one that never gets any is updated by hooks alone.

        Args:
            parameters: those that an optimizer updates.
        """
        if self._exist:
            stage, updated = self._stage, {id(parameter) for parameter in parameters}
            stage.presence = replace(stage.presence, copies=stage.partition.copies)
            self._in_question = stage.presence.copies.in_question(stage.module, updated)
            self._notes = self._measure(self._tensors())

    def note_gradients(self, has_gradient: Callable[[nn.Parameter], bool]) -> None:
        """After a backward whose gradients have been summed over the stages: leave out copies that have got any.

        Args:
            has_gradient: whether a parameter has got one; equal on all stages.
        """
        trained = {id(parameter) for parameter in self._in_question if has_gradient(parameter)}
        if not trained:
            return
        before = list(self._tensors())
        self._stage.note_trained(trained)
        after = self._tensors()
        self._notes = self._notes[[place for place, name in enumerate(before) if name in after]]
        left = {id(tensor) for tensor in after.values()}
        self._in_question = [parameter for parameter in self._in_question if id(parameter) in left]

    def begin_training(self) -> None:
        """Make the copies equal before a training step, after which hooks may write into them again."""
        self.share()
        self._trained = True

    def begin_evaluation(self) -> None:
        """Make the copies equal if a training step came before."""
        if self._trained:
            self.share()

    @torch.no_grad()
    def share(self) -> None:
        """Hand round what changed since the last call; collective over the pipeline.

        Raises:
            RuntimeError: a tensor was changed in different ways.
        """
        self._trained = False
        if not self._exist:
            return
        tensors = self._tensors()
        notes = self._measure(tensors)
        changed = (notes != self._notes) & ~(notes.isnan() & self._notes.isnan())
        mine = torch.cat([changed.any(1, keepdim=True).double(), notes], 1)
        everyone = [torch.empty_like(mine) for _ in self._ranks]
        with waits.on(waits.collective, "all_gather", mine, self._group):
            dist.all_gather(everyone, mine, group=self._group)
        in_order = dict(zip(sorted(self._ranks), (entry.cpu() for entry in everyone), strict=True))
        for index, (name, tensor) in enumerate(tensors.items()):
            rows = {rank: in_order[rank][index] for rank in self._ranks}
            writers = [rank for rank, row in rows.items() if row[0]]
            self._check(name, [rows[rank][1:] for rank in writers])
            if writers and len(writers) < len(rows):
                value = tensor.detach().contiguous()
                raw_broadcast(value, writers[0], self._group)
                tensor.copy_(value)
        self._notes = self._measure(tensors)

    def _tensors(self) -> dict[str, Tensor]:
        return self._stage.presence.copies.tensors(self._stage.module) if self._exist else {}

    @torch.no_grad()
    def _measure(self, tensors: dict[str, Tensor]) -> Tensor:
        """Two numbers that change with a tensor's content: ``[tensor, 2]``."""
        rows = [torch.stack([t.sum(dtype=torch.float64), t.double().square().sum()]) for t in tensors.values()]
        return torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64, device=self._device)

    def _check(self, name: str, found: list[Tensor]) -> None:
        if any(not torch.allclose(other, found[0], rtol=_ALIKE, equal_nan=True) for other in found[1:]):
            raise RuntimeError(
                f"hooks changed `{name}`, a copy that averages or follows weights, differently on the stages of the "
                "pipeline: each has its own part of the weights. Update the copy by name, "
                "`for name, source in self.net.named_parameters(): copy[name].lerp_(source, ...)`, or use "
                "`pipeline_parallel_size=1`."
            )
