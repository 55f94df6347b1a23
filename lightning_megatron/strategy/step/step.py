"""The protocol of a step, its outcome, and the mean of outcomes over replicas.

::

    Lightning          training_step ─────────▶ backward ─────────▶ optimizer step
    PlainStep          forward, logs leave      backward            finish: the replicas' logs have arrived
    ScheduledStep      forwards and backwards   gradients back      finish: right after the schedule
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.watch import waits
from lightning_megatron.strategy.logs.batch_writes import BatchChanges
from lightning_megatron.strategy.logs.combining import combine
from lightning_megatron.strategy.logs.step_logs import StepLogs


@dataclass
class Outcome:
    """Results of a step, equal on every rank of a pipeline.

    Attributes:
        logs: what was logged.
        loss: scalar mean loss over micro-batches and replicas; ``None`` in evaluation, and for a plain step, whose loss
            Lightning holds.
        output: what the step returned, merged for the whole batch; a training step's loss aside.
        state: changes to the module's plain attributes.
        stop: whether the step has asked the Trainer to stop, on any replica.
        differ: whether, on any replica, micro-batches differ in a logged number of which no trial has told how it comes
            together; in evaluation, whether the step is to be tried after this batch.
        unseen: whether, on any replica, the batch looks like none before it.
        batch: what the step has left in its batch; ``None`` if nothing.
    """

    logs: StepLogs
    loss: Tensor | None = None
    output: Any = None
    state: list[Any] = field(default_factory=list)
    stop: bool = False
    differ: bool = False
    unseen: bool = False
    batch: BatchChanges | None = None

    def training_output(self) -> Any:
        """Return value of ``training_step`` for the whole batch: the loss, or a dict with it."""
        if self.output is None:
            return self.loss
        return {"loss": self.loss, **self.output}


class Accumulation(NamedTuple):
    """A batch among those whose gradients are averaged for one update.

    Attributes:
        batches: how many there are.
        first: whether this batch is the first.
        last: whether gradients are summed over replicas after it.
        scale: factor of the loss while gradients are computed.
    """

    batches: int = 1
    first: bool = True
    last: bool = True
    scale: float = 1.0


class Step(Protocol):
    """One way of running a batch; the object serves one batch after the other."""

    def forward(self, call: Callable[[Any], Any], batch: Any, window: Accumulation) -> Any:
        """Run the user's ``training_step``.

        Args:
            call: takes a (micro-)batch.
            batch: equal on all stages of a replica.
            window: where the batch stands.

        Returns:
            What Lightning takes for the step's output.
        """

    def backward(self, loss: Tensor, autograd: Callable[[Tensor], None], window: Accumulation) -> None:
        """Leave the summed gradients in ``.grad``, or in shards.

        Args:
            loss: as Lightning has it: of the batch, divided by the batches of an update.
            autograd: runs the backward of a loss.
            window: where the batch stands.
        """

    def finish(self) -> Outcome | None:
        """The outcome of the step, once; ``None`` while its backward is to come, and after it was taken."""

    def evaluate(self, call: Callable[[Any], Any], batch: Any, name: str) -> Outcome:
        """Forward of one batch of validation, test or prediction; ``name`` is that of the user's step."""


class ReplicaMean:
    """Averages losses and combines logged values over data-parallel replicas.

    Args:
        mesh: the grid.
        device: where tensors live.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self._device = device
        self._replicas = mesh.layout.data
        self._group = mesh.group("data_parallel") if mesh.layout.data > 1 else None
        self._pending: tuple[Any, Tensor] | None = None
        self._logged = torch.zeros(1, 0, 3)

    def start(self, outcome: Outcome, *, trains: bool) -> None:
        """Begin without waiting; :meth:`finish` must follow.

        Args:
            outcome: this replica's.
            trains: whether all replicas take this step, so that they can agree on whether to stop. In evaluation some
                may have fewer batches than others, and meet only where something is logged.
        """
        self._pending, self._logged = None, torch.zeros(1, 0, 3)
        if self._group is None or not (trains or outcome.logs.keys):
            return
        loss = outcome.loss if outcome.loss is not None else torch.zeros((), dtype=torch.float64)
        loss, rows = loss.reshape(1).to(self._device, torch.float64), outcome.logs.rows.reshape(-1)
        mine = torch.cat([loss, rows.new_tensor([outcome.stop, outcome.differ, outcome.unseen]), rows])
        rows = torch.empty(self._replicas, mine.numel(), dtype=mine.dtype, device=self._device)
        work = dist.all_gather(list(rows.unbind()), mine, group=self._group, async_op=True)
        self._pending = (work, rows)

    def finish(self, outcome: Outcome) -> None:
        """Wait for what :meth:`start` began, and put the values over all replicas into ``outcome``."""
        if self._pending is None:
            return
        work, everyone = self._pending
        with waits.on(self._told):
            work.wait()
        if outcome.loss is not None:
            outcome.loss = everyone[:, 0].mean().to(outcome.loss.dtype)
        outcome.stop, outcome.differ, outcome.unseen = everyone[:, 1:4].any(0).tolist()
        self._logged = gathered = everyone[:, 4:].view(self._replicas, -1, 3)
        for index, key in enumerate(outcome.logs.keys):
            values, weights = gathered[:, index, 0], gathered[:, index, 1]
            outcome.logs.rows[index, 0] = combine(key.how, values, weights)

    def values(self, index: int) -> Tensor:
        """The values that each replica has logged in a row of the latest outcome."""
        return self._logged[:, index, 0]

    def unlike(self, tolerance: float) -> list[bool]:
        """Whether each row of the latest outcome has other values on some replica.

        Args:
            tolerance: relative.
        """
        if not self._logged.numel():
            return []
        values = self._logged[:, :, 0]
        apart, largest = values.amax(0) - values.amin(0), values.abs().amax(0)
        told: list[bool] = (~(apart <= tolerance * largest)).tolist()  # no number is unlike any
        return told

    def _told(self) -> waits.Waiting:
        """Description of the wait in :meth:`finish`."""
        what = f"loss and logged values over {waits.members(self._group)}"
        return waits.Waiting(what, waits.ranks_of(self._group))
