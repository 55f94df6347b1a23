"""Losses that are made of padding, too, where each replica pads its batch to the longest of its own samples.

One process pads all samples to the longest of all replicas. A mean over tokens that are not ignored does not see that,
nor does a mean over samples; others do::

    replica 0   a b . .      (l * mask).sum() / l.numel()     2 of 4       6 of 12 in one process, and not
    replica 1   c d e f                                       4 of 4       the mean of 2/4 and 4/4

So where replicas have batches of unlike lengths, a sample that is shorter than its batch is tried as it is and as long
as it is itself. The loss is the same, or the user is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron.mesh.batches import batch_size_of, even_tensors, map_tensors, samples_of
from lightning_megatron.mesh.draws.same_draws import SameDraws
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import raw_all_gather
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep, loss_of
from lightning_megatron.pipeline.stage.final_state import TRIAL
from lightning_megatron.strategy.carried.rows_of_samples import NOTHING_KEPT
from lightning_megatron.strategy.logs.step_logs import no_logs
from lightning_megatron.strategy.loss.over_replicas import OverReplicas
from lightning_megatron.strategy.loss.replicas_said import warn_of_padding
from lightning_megatron.strategy.loss.traces import Traces
from lightning_megatron.strategy.loss.trials.pieces_tried import Tried
from lightning_megatron.strategy.loss.trials.samples_apart import AllJoined
from lightning_megatron.strategy.loss.weighing import narrowest
from lightning_megatron.strategy.step.step import Outcome
from lightning_megatron.strategy.step.step_context import StepContext

_PADS = (0, -100)  # one tensor ends with these at least
_LEAST = 2  # columns: one may be a token of the sample
_OFTEN = 16  # steps in which lengths are compared; later in those whose numbers are powers of two
_ENOUGH = 3  # trials
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative


class Short(NamedTuple):
    """A sample of a batch.

    Attributes:
        padded: as long as its batch.
        alone: as long as it is.
        length: of the batch.
    """

    padded: Any
    alone: Any
    length: int


class PaddingOverReplicas:
    """Tells users that a loss is made of padding, which replicas have of their own.

    Args:
        context: what steps run on.
        replicas: what trials have to do with them.
    """

    def __init__(self, context: StepContext, replicas: OverReplicas) -> None:
        self._context, self._replicas = context, replicas
        self._steps, self._tried = 0, 0

    def look(self, call: Callable[[Any], Any], batch: Any) -> None:
        """Try a step, where replicas have batches of unlike lengths. Collective over the world.

        Args:
            call: the user's step, taking a batch.
            batch: of this replica.
        """
        self._steps += 1
        if self._tried >= _ENOUGH or (self._steps > _OFTEN and self._steps & (self._steps - 1)):
            return
        short, device = shortest_of(batch), self._context.device
        mine = torch.tensor([[length_of(batch), int(short is not None)]], device=device)
        lengths, found = raw_all_gather(mine, 0, self._replicas.group).t().tolist()
        if not all(lengths) or len(set(lengths)) == 1 or not any(found):
            return
        self._tried += 1
        one = samples_of(batch, 0, 1)
        told = self._losses(call, short or Short(one, one, 0))
        for length, padded, alone, tolerance in told:
            if length and abs(padded - alone) > tolerance * max(abs(padded), abs(alone)):
                self._tried = _ENOUGH
                return warn_of_padding(length, padded, alone, self._context.mesh.layout.data)

    def _losses(self, call: Callable[[Any], Any], short: Short) -> list[tuple[int, float, float, float]]:
        """Of each replica: the length of its batch, or 0 where nothing is known, the losses, and what is rounding."""
        context, joins = self._context, AllJoined(short.padded, [short.alone])
        call = context.gradients.on_parts(call)
        call = context.experts.ending(call) if context.stages.repeats is None else call
        draws = SameDraws(joins.joins, context.streams.is_foreign, context.streams.of_batch.others)
        traces = Traces(context.module, beside=True)
        tried = Tried(call, context.recording, traces, joins, context.stages, 2, None, draws, NOTHING_KEPT)
        step = PipelineStep(context.schedule(2, forward_only=True), tried, joins.pieces, TRIAL)
        windows, passes = context.gradients.windows, context.passes
        spread = nullcontext() if windows is None else windows.trial()
        streams = context.streams.trial(rows=joins.rows())
        running = context.stages.running(short.padded, 2, training=False)
        with _without_dropout(context.module), streams, spread, context.tries(), running as executor:
            executor.run(step) if passes is None else passes.try_on(step, context.streams)
        drawn = objects.gather(draws.any, context.mesh.group("world"))

        def found() -> Outcome:
            alone, padded = (loss_of(step.outputs[index]).detach() for index in range(2))
            known = math.isfinite(float(alone)) and math.isfinite(float(padded)) and not (tried.failed or any(drawn))
            tolerance = _TOLERANCE.get(narrowest(padded, context.device), 2e-2)
            mine = (short.length if known else 0, float(padded), float(alone), tolerance)
            return Outcome(no_logs(context.device), output=[objects.gather(mine, self._replicas.group)])

        output = context.stages.outcome(found, TRIAL).output
        context.stages.settle()
        return output[0] if isinstance(output, list) else []


def length_of(batch: Any) -> int:
    """Dimension 1 of the tensors of a batch that may be padded; 0 where there are none.

    Args:
        batch: the user's.
    """
    tensors = _rows(batch)
    integers = (tensor.shape[1] for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex()))
    return next(integers, next((tensor.shape[1] for tensor in tensors), 0))


def shortest_of(batch: Any) -> Short | None:
    """The sample of a batch with the most padding at its end; ``None`` if none has any, as far as can be told.

    Args:
        batch: the user's; padding are equal numbers at the end of a sample in all of its tensors, in one of them 0 or
            -100.
    """
    length = length_of(batch)
    padded = [tensor for tensor in _rows(batch) if tensor.shape[1] == length]
    if not padded or any(length in tensor.shape[2:] for tensor in padded):
        return None
    columns = torch.stack([_ends_of(tensor) for tensor in padded]).amin(0)
    marked = torch.stack([_is_marked(tensor) for tensor in padded]).any(0)
    columns = torch.where(marked, columns, 0).clamp(max=length - 1)
    at = int(columns.argmax())
    if int(columns[at]) < _LEAST:
        return None
    one, kept = samples_of(batch, at, at + 1), length - int(columns[at])

    def shortened(tensor: Tensor) -> Tensor:
        return tensor[:, :kept] if tensor.ndim > 1 and tensor.shape[:2] == (1, length) else tensor

    return Short(one, map_tensors(one, shortened), length)


def _rows(batch: Any) -> list[Tensor]:
    """Tensors with one row of several numbers per sample."""
    size = batch_size_of(batch)
    plain = (tensor for tensor in even_tensors(batch) if tensor.layout is torch.strided)
    return [tensor for tensor in plain if tensor.ndim > 1 and tensor.shape[0] == size and tensor.numel()]


def _ends_of(tensor: Tensor) -> Tensor:
    """By sample, how many columns at its end are one number."""
    flat = tensor.flatten(2) if tensor.ndim > 2 else tensor[:, :, None]
    same = (flat == flat[:, -1:, :1]).all(2)
    return same.flip(1).long().cumprod(1).sum(1)


def _is_marked(tensor: Tensor) -> Tensor:
    """By sample, whether its last column is a usual mark of padding."""
    last = tensor[:, -1].reshape(len(tensor), -1)[:, 0]
    return torch.stack([last == pad for pad in _PADS]).any(0)


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    """While samples of unlike lengths run, of which each would draw its own."""
    modes = [(child, child.training) for child in module.modules()]
    try:
        for child, _ in modes:
            child.training = False
        yield
    finally:
        for child, mode in modes:
            child.training = mode
