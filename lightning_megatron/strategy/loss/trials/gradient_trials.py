"""Gradients of some pieces of a batch, tried and thrown away; and whether code in backwards mixes samples.

The loss of a batch may be the mean of the losses of its micro-batches, and its gradient another than the sum of
theirs: a hook on an activation that divides by the norm of what it gets, an ``autograd.Function`` with a backward of
its own, a loss scaled by a detached one. So where there is such code, two micro-batches are run with their backwards,
and both at once::

    F0 B0  F1 B1   weights as in the step    ──▶  g₀ + g₁     ┐ equal: each sample by itself
    F01 B01                                  ──▶  g           ┘ else batches stay whole
"""

from __future__ import annotations

import math
import warnings
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
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import Started, raw_all_reduce, start_all_reduce
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.mesh.watch.echoes import RemoteFailure, is_echo
from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep, trained_loss_of
from lightning_megatron.pipeline.stage.final_state import TRIAL_WITH_BACKWARD
from lightning_megatron.strategy.hooks import backward_code
from lightning_megatron.strategy.logs.batch_copies import whole_copy
from lightning_megatron.strategy.logs.step_logs import no_logs
from lightning_megatron.strategy.loss import said
from lightning_megatron.strategy.loss.over_replicas import TriedParts
from lightning_megatron.strategy.loss.tables import Name
from lightning_megatron.strategy.loss.traces import Traces
from lightning_megatron.strategy.loss.trials.pieces_tried import differs, next_try, some_of
from lightning_megatron.strategy.step.step import Outcome
from lightning_megatron.strategy.step.step_context import StepContext

_EARLY = 16  # steps before which it is tried more often, as what numbers decide, those of one batch may decide alike
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 5e-5}  # relative, of gradients
_NARROW = 2e-2


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
        running, passes = stages.running(pieces[-1], 1, training=False), stages.repeats
        with context.streams.trial(), context.gradients.without_hooks() as sink, running as executor:
            runs: Callable[[PipelineStep], None] = executor.run
            if passes is not None and passes.includes("training_step"):
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
        weights = self._traces.weights.noted()
        self._at(index)
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
            with torch._C.DisableTorchFunction():
                self._traces.put_back()

    def _undo_backward(self) -> None:
        self.wrote += self._traces.changes()
        self._traces.put_back()


class BackwardTrials:
    """Tries whether code of the user that runs in backwards, or decides what they see, mixes the samples of a batch.

    Args:
        context: what steps run on.

    Attributes:
        begins: whether the next step is the first of a phase.
    """

    def __init__(self, context: StepContext) -> None:
        mesh, options, module = context.mesh, context.options, context.module
        self._context, self._mesh = context, mesh
        cuts = mesh.layout.pipeline > 1 or options.micro_batch_size != "auto"
        self._judges = options.whole_batch_loss is not False
        self._code = backward_code.BackwardCode(module) if cuts and module.automatic_optimization else None
        self._mentioned = self._code is not None and self._any(self._code.mentioned)
        looks = self._judges and self._code is not None
        called = functions_of_step(module) if looks else []
        lines = backward_code.lines_out_of_graph(called)
        self._line = lines[0] if lines else "code of the module"
        self._takes_out = looks and self._any(bool(lines))
        self._once = self._takes_out and self._any(backward_code.reads_gradients(called))  # which a trial would clear
        self._steps, self._next, self._found, self.begins = 0, 1, False, True
        self._told: tuple[torch.Tensor, Started | None] | None = None

    def mixes(
        self, call: Callable[[Any], Any], batch: Any, parts: Sequence[Any], scales: Sequence[float], *, around: bool
    ) -> bool:
        """Whether this batch is the one that has shown that samples are mixed. Collective over the world.

        Args:
            call: the user's step, taking a (micro-)batch.
            batch: equal on all stages of a replica.
            parts: its micro-batches; or all of it, where the code around the layers runs on it whole.
            scales: of the losses of the first two, in that of both.
            around: whether the layers run in micro-batches nevertheless.

        Raises:
            RuntimeError: code that a step before has run for the first time mixes samples.
        """
        code = self._code
        if code is None or self._found:
            return False
        self._steps += 1
        begins, self.begins = self.begins, False
        timely = self._steps >= self._next
        runs = (timely and self._mentioned) | self._take_told() | (self._steps == 1 and self._any(bool(code.fresh)))
        due = self._takes_out and (timely or begins) and not (self._once and self._steps > 1)
        if not (runs or due):
            self._guard()
            return False
        self._next, fresh = next_try(self._steps, 0 if runs else _EARLY), code.take()
        if self._mesh.layout.pipeline > 1 and self._any(bool(code.keeps)):
            backward_code.refuse_kept(next(filter(None, objects.gather(code.keeps, self._mesh.group("world")))))
        tells = runs or len(parts) > 1  # one backward tells nothing of what leaves the graph
        why_here = self._try(call, batch, parts, scales, around=around) if tells else ("", False)
        whys = objects.gather(why_here, self._mesh.group("world"))
        if stray := next((why for why, is_stray in whys if is_stray), ""):
            backward_code.refuse_stray(stray)
        why = next((why for why, _ in whys if why), "")
        if not (why and self._judges and (around or len(parts) > 1)):
            self._guard()
            return False
        self._found = True
        code.close()
        seen = next(filter(None, objects.gather(fresh, self._mesh.group("world"))), "")
        line = seen or self._line
        if not begins and (seen or not self._takes_out):
            backward_code.refuse_late(why, line, self._steps - 1)
        said.say_mixed(f"{why} ({line})", self._mesh.layout.data)
        if not begins:
            said.warn_of_earlier_steps(self._steps - 1)
        return True

    def close(self) -> None:
        """Give torch's methods back; warns, if the last step was the first to run something that was not tried."""
        if self._code is not None:
            self._code.close()
        if self._code is not None and self._code.fresh and self._steps > 1 and not self._found:
            warnings.warn(
                f"the last step was the first to run {self._code.fresh}: whether it mixes the samples of a batch was "
                "not tried, and that step may not be the step of one process.",
                stacklevel=2,
            )

    def rest(self, *, failed: bool = False) -> None:
        """Called when a step is over: what runs between steps may register what it likes.

        Args:
            failed: whether the step did not come to its end.
        """
        if self._code is None:
            return
        self._code.refuses = ""
        if failed:
            self._code.take()
        elif self._mentioned and not self._found:
            self._take_told()
            here = torch.tensor(int(bool(self._code.fresh)), device=self._context.device)
            self._told = start_all_reduce(here, self._mesh.group("world"), keep=False, maximum=True)

    def _guard(self) -> None:
        if self._code is not None and self._judges and not self._mentioned:
            self._code.refuses = "a batch runs in micro-batches"

    def _take_told(self) -> bool:
        """Whether the step before has run something new on any rank, which was asked when it ended."""
        if self._told is None:
            return False
        (flag, work), self._told = self._told, None
        if work is not None:
            work.wait()
        return bool(int(flag))

    def _any(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        flag = torch.tensor(int(here), device=self._context.device)
        return bool(int(raw_all_reduce(flag, self._mesh.group("world"), maximum=True)))

    def _try(
        self, call: Callable[[Any], Any], batch: Any, parts: Sequence[Any], scales: Sequence[float], *, around: bool
    ) -> tuple[str, bool]:
        """Why batches have to stay whole, "" if they need not; and whether that is on a stage that cannot tell."""
        module, pieces = self._context.module, list(parts[:2])
        if self._code is not None and self._code.keeps:
            return "the gradient of an activation is kept, and that of a micro-batch is another one", False
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        alike = self._context.options.gradients.experts == 1
        trial = GradientTrial(self._context, trained, alike=alike, keep=some_of)
        far = trial.differing(call, pieces, batch, scales=scales)
        outside = [name for name in trial.wrote if name[0] not in Parts(self._context.layers)]
        if trial.wrote:
            name = ".".join(str(part) for part in (outside or trial.wrote)[0] if part not in ("", None))
            why = f"a backward writes `{name}`, which the backwards of micro-batches would write several times"
            return why, bool(outside) and self._mesh.rank != self._mesh.loss_rank
        if len(pieces) == 1:
            runs = around and self._code is not None and self._code.runs
            return "code runs in backwards, and only the layers run in micro-batches" if runs else "", False
        why = f"the gradient of `{far}` for two micro-batches at once is not the sum of its gradients for each of them"
        return why if far else "", False


class BackwardsOverReplicas:
    """Tells users that code in backwards is another one on each replica, where batches are not cut.

    Such code gets the gradients of a replica's own samples, of its own loss. Where that is the same for samples one by
    one, the mean over two parts of a batch is the gradient of both at once.

    Args:
        context: what steps run on.
        asks: whether replicas' batches are tried at all.
    """

    def __init__(self, context: StepContext, *, asks: bool) -> None:
        self._context, self._steps = context, 0
        called = functions_of_step(context.module) if asks else []
        self._why = backward_code.why_tried(context.module, called) if asks else ""
        self._next = 1.0 if asks and all(objects.gather(bool(self._why), context.mesh.group("world"))) else math.inf
        self._once = backward_code.reads_gradients(called)

    def is_due(self, *, begins: bool) -> bool:
        """Whether this step, which may be the first of a phase, is to be tried; on all ranks alike."""
        self._steps += 1
        return self._steps >= self._next or (begins and self._next < math.inf)

    def look(self, call: Callable[[Any], Any], pieces: TriedParts | None, way: Any) -> None:
        """Try a step, and say so once. Collective over the world.

        Args:
            call: the user's step, taking a batch.
            pieces: of this replica's batch; ``None`` if it has none.
            way: what the loss is a mean of, as :attr:`.Reading.way` says.
        """
        self._next = math.inf if self._once else next_try(self._steps, _EARLY)
        if pieces is None:
            return
        parts = pieces.parts[:2]
        trained = {name: p for name, p in self._context.module.named_parameters() if p.requires_grad}
        counts = [1.0, 1.0] if way == "sum" else [float((way or batch_size_of)(part)) for part in parts]
        total = 1.0 if way == "sum" else sum(counts) or 1.0
        shares = [count / total for count in counts]
        trial = GradientTrial(self._context, trained, may_fail=True, keep=some_of)
        far = trial.differing(call, parts, pieces.whole, shares=shares)
        told = objects.gather(far, self._context.mesh.group("world"))
        if name := next((each for each in told if each), ""):
            self._next = math.inf
            why = f"the gradient of `{name}` for two parts of a batch at once is not the mean of theirs: {self._why}"
            said.warn_of_mixed(why, self._context.mesh.layout.data)
