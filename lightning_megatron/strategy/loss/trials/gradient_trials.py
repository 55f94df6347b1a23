"""Gradients of some pieces of a batch, tried and thrown away.

The loss of a batch may be the mean of the losses of its micro-batches, and its gradient another than the sum of
theirs: a hook on an activation that divides by the norm of what it gets, an ``autograd.Function`` with a backward of
its own, a loss scaled by a detached one. So where there is such code, two micro-batches are run with their backwards,
and both at once::

    F0 B0  F1 B1   weights as in the step    ──▶  g₀ + g₁     ┐ equal: each sample by itself
    F01 B01                                  ──▶  g           ┘ else batches stay whole
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.mesh.batches import batch_size_of, samples_of
from lightning_megatron.mesh.draws.global_rows import Deal
from lightning_megatron.mesh.draws.same_draws import SameDraws
from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.mesh.watch.echoes import RemoteFailure, is_echo
from lightning_megatron.pipeline.elsewhere.undo import Contents, is_equal
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep, trained_loss_of
from lightning_megatron.pipeline.stage.final_state import TRIAL_WITH_BACKWARD
from lightning_megatron.strategy.logs.batch_copies import whole_copy
from lightning_megatron.strategy.logs.step_logs import no_logs
from lightning_megatron.strategy.loss.tables import Name
from lightning_megatron.strategy.loss.traces import Changes, Traces
from lightning_megatron.strategy.step.step import Outcome
from lightning_megatron.strategy.step.step_context import StepContext

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 5e-5}  # relative, of gradients
_NARROW = 2e-2
_COMPARED = 1 << 16  # elements of a gradient
_SMALL = 0.03  # times the largest gradient: below it there is nothing but rounding


def tolerance(device: torch.device, dtypes: Iterable[torch.dtype]) -> float:
    """By how much gradients may differ by rounding, relative to their size.

    Args:
        device: on which they were computed; under autocast, they are narrow whatever their dtypes.
        dtypes: in which they were computed.
    """
    if torch.is_autocast_enabled(device.type):
        return _NARROW
    return max((_TOLERANCE.get(dtype, _NARROW) for dtype in dtypes), default=0.0)


class GradientTrial:
    """Runs pieces of a batch one by one, forward and backward, through the pipeline; leaves nothing behind.

    Args:
        context: what steps run on.
        parameters: by name, those whose gradients are asked for.
        around: each run of the user's step.
        may_fail: whether a step that fails on a piece tells nothing, rather than ending the run.
        at: told which of the pieces the step runs on next.
        alike: whether context ranks have the same parameters, whose gradients are parts of one sum: tokens of two
            pieces at once are dealt out otherwise than those of each.
        keep: gives what is kept of a gradient.

    Attributes:
        draws: of random numbers.
        failed: whether a step has failed.
        loss: the largest magnitude of one on this stage.
        wrote: names of what backwards have written on the module or beside it.
    """

    def __init__(
        self,
        context: StepContext,
        parameters: Mapping[str, nn.Parameter],
        *,
        around: AbstractContextManager[Any] | None = None,
        may_fail: bool = False,
        at: Callable[[int], None] = lambda _: None,
        alike: bool = True,
        keep: Callable[[Tensor], Tensor] = torch.clone,
    ) -> None:
        sums = alike and context.mesh.layout.context > 1
        self._sums = context.mesh.group("context_parallel") if sums else None
        self._context, self._parameters, self._may_fail, self._at = context, parameters, may_fail, at
        self._around, self._keep = nullcontext() if around is None else around, keep
        self._traces = Traces(context.module, beside=True)
        self.draws, self.failed, self.loss = SameDraws({2: (0, 1)}), False, 0.0
        self.wrote: list[Name] = []
        self._left: Changes = {}  # by the step, up to its backward
        self._held: list[Contents] = []
        self._runs_again = False

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Those that norms may compute in, whatever their input."""
        return {torch.float32} if self.draws.narrow else set()

    def run(
        self, call: Callable[[Any], Any], pieces: Sequence[Any], scales: Sequence[float]
    ) -> list[dict[str, Tensor]]:
        """Gradients of each piece, by name; collective over the pipeline.

        Args:
            call: the user's step, taking a (micro-)batch.
            pieces: two, and both at once; or one.
            scales: factors of their losses.
        """
        context, stages, found = self._context, self._context.stages, list[dict[str, Tensor]]()
        call = context.experts.ending(call) if stages.repeats is None else call

        def step(piece: Any, _: int) -> Any:
            return self._step(call, piece, len(found))

        schedule, backwards = context.schedule(1, forward_only=False), context.precision.backward
        running, passes = stages.running(pieces[-1], 1, training=False), context.passes
        self._runs_again = passes is None and schedule.chunks > 1
        with context.streams.trial(), context.gradients.without_hooks() as sink, running as executor:
            runs: Callable[[PipelineStep], None] = executor.run
            if passes is not None:
                runs = partial(passes.train, undone=lambda **_: nullcontext(), streams=context.streams)
            sizes = [batch_size_of(piece) for piece in pieces]
            dealt = [*Deal().rows(sizes[:2]), *Deal().rows(sizes[2:])]
            for piece, rows, scale in zip(pieces, dealt, scales, strict=True):
                context.streams.use_rows([rows])
                sink.begin(fresh=True, reduce=False)
                trial = PipelineStep(schedule, step, [piece], TRIAL_WITH_BACKWARD, [scale], sink, backwards=backwards)
                context.gradients.on_parts(runs)(trial)
                graded = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
                found.append({name: self._keep(grad.detach()) for name, grad in graded.items()})
                self._undo_backward()
            sink.begin(fresh=True, reduce=False)
        stages.outcome(lambda: Outcome(no_logs(context.device)), TRIAL_WITH_BACKWARD)
        stages.settle()
        return found if self._sums is None else [self._summed(each, self._sums) for each in found]

    def differing(
        self,
        call: Callable[[Any], Any],
        parts: Sequence[Any],
        both: Any,
        *,
        scales: Sequence[float] = (1.0, 1.0),
        shares: Sequence[float] = (1.0, 1.0),
    ) -> str:
        """The first parameter whose gradient of two parts at once is not the sum of theirs; "" if there is none.

        Args:
            call: the user's step, taking a (micro-)batch.
            parts: two; or one, which differs from nothing.
            both: their samples at once, or more.
            scales: factors of the parts' losses.
            shares: factors of the gradients that their backwards give.
        """
        if len(parts) == 1:
            self.run(call, parts, [1.0])
            return ""
        both = samples_of(both, 0, sum(map(batch_size_of, parts)))
        *found, whole = self.run(call, [*parts, both], [*scales, 1.0])
        dtypes = {parameter.dtype for parameter in self._parameters.values()} | self.dtypes
        return "" if self.failed else differs(whole, found, tolerance(self._context.device, dtypes), shares)

    def _summed(self, found: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
        none = ((name, torch.zeros_like(self._keep(p.detach()))) for name, p in self._parameters.items())
        return {name: raw_all_reduce(found.get(name, zeros), group, keep=False) for name, zeros in none}

    def _step(self, call: Callable[[Any], Any], piece: Any, index: int) -> Any:
        eager = torch.compiler.set_stance("force_eager")  # a layer first compiled here would stay uncompiled later
        weights = self._traces.noted()
        self._at(index)
        with torch._C.DisableTorchFunction():
            self._traces.put_back()  # what the run for other layers of this rank has left
        try:
            with self._context.recording.aside(), self.draws.run(index), self._around, weights, eager:
                output = call(whole_copy(piece))
                self.loss = max(self.loss, abs(float(trained_loss_of(output).detach())))
                return output
        except Exception as error:
            if isinstance(error, RemoteFailure) or is_echo(error) or not self._may_fail:
                raise
            self.failed = True  # it needs more samples, or skips some: nothing is known then
            return torch.zeros((), device=self._context.device, requires_grad=True)
        finally:
            with torch._C.DisableTorchFunction():  # it stays until the backward, which may read it
                self._leave()

    def _leave(self) -> None:
        """Note what a run has written, and leave what the one before has, whose graph may hold it."""
        now = self._traces.changes()
        self._left |= now
        if not self._runs_again:
            return
        names = [name for name, (_, value) in now.items() if isinstance(value, Tensor)]
        written = [table.values[key] for table, key in self._traces.tables(names)]
        places = set(map(id, written))
        for held in self._held:
            if id(held.value) not in places or is_equal(held.value, held.copy):
                held.rewind()
        here = [each for each in self._context.module.buffers() if type(each) is Tensor and not each.is_meta]
        self._held = [Contents.of_tensor(each) for each in {id(each): each for each in (*here, *written)}.values()]

    def _undo_backward(self) -> None:
        changes, left = self._traces.changes(), self._left
        self.wrote += (
            name for name, (_, now) in changes.items() if name not in left or not is_equal(left[name][1], now)
        )
        self._traces.put_back()
        self._left, self._held = {}, []


def some_of(gradient: Tensor) -> Tensor:
    """Numbers of a gradient by which it is compared: some of a large one, as three of these would take memory."""
    each = gradient.numel() // _COMPARED
    return gradient.reshape(-1)[:: each | 1].clone() if each else gradient.clone()


def differs(
    whole: Mapping[str, Tensor],
    parts: Sequence[Mapping[str, Tensor]],
    tolerance: float,
    shares: Sequence[float] = (1.0, 1.0),
) -> str:
    """The first parameter whose gradient of a batch is not the sum of shares of those of its parts."""
    norms = {name: float(gradient.double().norm()) for name, gradient in whole.items()}
    least = _SMALL * max(norms.values(), default=0.0)
    for name, gradient in whole.items():
        rest = gradient.double()
        for part, share in zip(parts, shares, strict=True):
            rest = rest - part[name].double() * share if name in part else rest
        if not float(rest.norm()) <= tolerance * max(norms[name], least):
            return name
    return ""
