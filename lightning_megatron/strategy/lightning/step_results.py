"""Results of training steps, as Lightning's loop keeps them for hooks after the batch.

A replica knows the loss of its own samples when its step returns, and Lightning then makes the result that
``on_train_batch_end(outputs, ...)`` will see; the mean over all replicas arrives during the backward::

    training_step ─▶ result: this replica's loss ─▶ backward ─▶ result: the mean loss ─▶ on_train_batch_end

So hooks that keep, average or judge ``outputs["loss"]`` do what they do in one process.
"""

from __future__ import annotations

import weakref
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor


class _Skipped:
    """Stands for the ``None`` of a step."""


_SKIPPED = _Skipped()


class StepResults:
    """Makes Lightning's results of training steps, in the place of its class, until :meth:`remove`.

    Args:
        trainer: of the run.
        replicas: how many there are.
    """

    def __init__(self, trainer: pl.Trainer, replicas: int) -> None:
        self._replicas, self._world = replicas, trainer.world_size
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._loop.output_result_cls = self  # type: ignore[assignment]
        self._latest: weakref.ref[ClosureResult] | None = None
        self._loss: Tensor | None = None
        self._batches = 1

    def __reduce__(self) -> Any:
        """Copies of a Trainer have Lightning's class in this place."""
        return _of_lightning, ()

    def begin(self) -> None:
        """A step begins."""
        self._latest = self._loss = None

    def of_all_replicas(self, loss: Tensor) -> None:
        """The mean loss of the step over the replicas is known: before its result is made, or afterwards."""
        self._loss = loss
        latest = self._latest() if self._latest is not None else None
        if latest is not None:
            self._put(latest)

    def from_training_step_output(self, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        """See Lightning's; of a skipped step, a result without a loss."""
        self._batches = normalize
        if training_step_output is _SKIPPED:
            return ClosureResult(None)
        result = ClosureResult.from_training_step_output(training_step_output, normalize)
        self._latest = weakref.ref(result)
        self._put(result)
        return result

    def _put(self, result: ClosureResult) -> None:
        if self._loss is not None and result.loss is not None and result.loss.numel() == 1:
            result.loss = (self._loss / self._batches).to(result.loss).reshape(result.loss.shape)

    def skippable(self, output: Any, module: pl.LightningModule) -> Any:
        """The output of ``training_step``, for Lightning, which skips steps that return ``None`` on one device and
        refuses them on several, of which one might skip and another not. The ranks of one replica compute one loss, and
        so may.

        Args:
            output: of the step.
            module: the user's module.
        """
        if output is not None or self._replicas > 1 or self._world == 1 or not module.automatic_optimization:
            return output
        return _SKIPPED

    def remove(self) -> None:
        """Give Lightning's class back."""
        if vars(self._loop).get("output_result_cls") is self:
            del self._loop.output_result_cls


def _of_lightning() -> type[ClosureResult]:
    return ClosureResult
