"""The protocol of a step, and its outcome.

::

    Lightning          training_step ─────────▶ backward ─────────▶ optimizer step
    PlainStep          forward, logs leave      backward            finish: the replicas' logs have arrived
    ScheduledStep      forwards and backwards   gradients back      finish: right after the schedule
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lightning_megatron.strategy.logs.batch_writes import BatchChanges
from lightning_megatron.strategy.logs.step_logs import StepLogs


@dataclass
class Outcome:
    """Results of a step, equal on every rank of a pipeline.

    Attributes:
        logs: what was logged.
        loss: scalar mean loss over micro-batches and replicas; ``None`` in evaluation, and for a plain step on one
            replica, whose loss Lightning holds.
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


def call_with(step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Any) -> Any:
    """The user's step with ``batch`` in the place of the whole one."""
    if args:
        return step(batch, *args[1:], **kwargs)
    first = next(iter(kwargs))
    return step(**{**kwargs, first: batch})
