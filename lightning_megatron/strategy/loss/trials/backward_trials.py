"""In which steps gradients are tried, and what follows: over micro-batches, and over replicas."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_megatron.mesh.batches import batch_size_of
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import Started, raw_all_reduce, start_all_reduce
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.pipeline.elsewhere.reachable import functions_of_step
from lightning_megatron.strategy.hooks import backward_code
from lightning_megatron.strategy.loss import said
from lightning_megatron.strategy.loss.trials.gradient_trials import GradientTrial, some_of
from lightning_megatron.strategy.loss.trials.joined_pieces import TriedParts
from lightning_megatron.strategy.loss.trials.pieces_tried import next_try
from lightning_megatron.strategy.step.step_context import StepContext

_EARLY = 16  # steps before which it is tried more often, as what numbers decide, those of one batch may decide alike


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
