"""Steps of manual optimization: backwards that they run themselves, and weights that they update themselves.

Gradients are summed over the ranks that share a parameter around a backward that Lightning runs. With manual
optimization a step may run its own, ``loss.backward()`` instead of ``self.manual_backward(loss)``, as often as it
likes, and one process does not tell the two apart. So while such a step runs, ``torch.autograd.backward``, which
``Tensor.backward`` calls, is this package's.

A step that updates weights by a norm over ``parameter.grad`` computes another norm on every tensor-parallel rank, from
its slices. The weights that all of these ranks hold show it: they are copies no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_megatron.layers.table import ParameterSharding
from lightning_megatron.mesh.messages.collectives import extremes_over
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.mesh.torch_functions import METADATA, line_of_user
from lightning_megatron.pipeline.elsewhere.away import Away, make_real, refuse_away, tensors_in
from lightning_megatron.pipeline.run.passes import Passes
from lightning_megatron.pipeline.run.pipeline_step import loss_of
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.lightning import distributed
from lightning_megatron.strategy.logs.step_logs import LogRecorder
from lightning_megatron.strategy.loss.cuts import Cut, Cuts
from lightning_megatron.strategy.loss.replicas_said import warn_of_own_gradients
from lightning_megatron.strategy.step.step import Accumulation, Outcome
from lightning_megatron.strategy.step.step_context import StepContext

_ALIKE = {torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative


class BackwardsByHand:
    """Inside, every backward that reaches parameters has its gradients summed.

    Args:
        summing: gives what is to be around a backward.
        shows_parts: gives what is to be around all of that in a step, which may see split parameters whole.
    """

    def __init__(
        self,
        summing: Callable[[], AbstractContextManager[None]],
        shows_parts: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._summing, self._shows_parts = summing, shows_parts
        self._torchs: Any = None
        self._replaced = Replacements()
        self._running = False

    def __enter__(self) -> None:
        self._torchs = torch.autograd.backward
        self._replaced.put(torch.autograd, "backward", self._backward)

    def __exit__(self, *_: object) -> None:
        self._replaced.take_back()

    def summed(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run ``backward``, and sum what gradients it leaves."""
        with self.allowed(), self._summing():
            backward(*args, **kwargs)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Around a backward that is as it should be."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        """Stands for ``torch.autograd.backward``."""
        inputs = args[5] if len(args) > 5 else kwargs.get("inputs")
        if self._running or not _reaches_parameters(inputs):
            self._torchs(*args, **kwargs)
        else:
            with self._shows_parts():
                self.summed(self._torchs, *args, **kwargs)


class GradientsTaken(TorchFunctionMode):
    """Sees gradients with respect to parameters that a step of one of several replicas takes by itself.

    They are those of the replica's own samples, where one process takes them of all, and scale what is trained: the
    weight of an adversarial loss, say. They are not put together here, as they may be meant of each sample. Whichever
    name user code calls ``torch.autograd.grad`` by, it runs the engine by this one.

    A step that gathers something afterwards may have put them together. Its next run is followed, to see whether each
    gradient, or something computed of it, is what it gathers::

        a = torch.autograd.grad(first, w)[0]      of this replica
        size = self.all_gather(a.norm())          computed of it: said to be of all
        self.all_gather(counts)                   of something else: says nothing of a gradient

    Args:
        replicas: how many there are.
    """

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self._replicas, self._said, self._replaced = replicas, replicas == 1, Replacements()
        self._engine: Any = None
        self._follows, self._gathered = False, set[str]()
        self._lines: dict[str, int] = {}  # of this step -> collectives before
        self._made: Any = WeakTensorKeyDictionary()  # of gradients -> their lines

    def __enter__(self) -> Any:
        if self._said:
            return self
        self._engine = torch.autograd._engine_run_backward
        self._replaced.put(torch.autograd, "_engine_run_backward", self._run)
        if self._follows:
            distributed.asked.listeners.append(self._hear)
            super().__enter__()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        followed = self._hear in distributed.asked.listeners
        if followed:
            super().__exit__(kind, *error)
            distributed.asked.listeners.remove(self._hear)
        self._replaced.take_back()
        lines, self._lines, self._made = self._lines, {}, WeakTensorKeyDictionary()
        if kind is not None:
            return
        alone = [line for line, before in lines.items() if followed or before == distributed.asked.count]
        if alone:
            self._said = True
            warn_of_own_gradients(alone[0], self._replicas)
        self._follows = bool(lines)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._made and func not in METADATA:
            lines = {line for each in tensors_in((args, kwargs)) for line in self._made.get(each, ())}
            for made in tensors_in(found) if lines else ():
                self._made[made] = lines.union(self._made.get(made, ()))
        return found

    def _run(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = args[3] if len(args) > 3 and kwargs.get("accumulate_grad") is False else ()
        if self._said or not any(isinstance(tensor, nn.Parameter) for tensor in inputs):
            return self._engine(outputs, *args, **kwargs)
        found = self._engine(outputs, *args, **kwargs)
        line = line_of_user()
        if line not in self._gathered:
            self._lines[line] = distributed.asked.count
            for gradient in tensors_in(found):
                self._made[gradient] = {line}
        return found

    def _hear(self, tensor: Tensor) -> None:
        for line in self._made.get(tensor, ()):
            self._gathered.add(line)
            self._lines.pop(line, None)


def _reaches_parameters(inputs: Any) -> bool:
    """Whether a backward with these ``inputs=`` leaves gradients on parameters; ``None`` for all leaves there are."""
    if inputs is None:
        return True
    chosen = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    return any(isinstance(tensor, nn.Parameter) for tensor in chosen)


class WeightCopies:
    """The parameters that all tensor-parallel ranks hold whole.

    Args:
        module: this rank's part of the user's module.
        table: how parameters are split.
        group: these ranks.
    """

    def __init__(self, module: nn.Module, table: Mapping[str, ParameterSharding], group: dist.ProcessGroup) -> None:
        named = module.named_parameters()
        self._copies = {name: copy for name, copy in named if name not in table or table[name].replicated}
        self._group = group

    def compare(self) -> None:
        """Compare them over the ranks; collective.

        Raises:
            RuntimeError: they differ: a step computes with slices somewhere.
        """
        if not self._copies:
            return
        with torch.no_grad():
            sums = torch.stack([copy.sum(dtype=torch.float64) for copy in self._copies.values()])
            sizes = torch.stack([copy.abs().sum(dtype=torch.float64) for copy in self._copies.values()])
        lowest, highest = extremes_over(sums, self._group)
        apart = (highest - lowest) / sizes.clamp(min=1e-30)
        for (name, copy), difference in zip(self._copies.items(), apart.tolist(), strict=True):
            if difference > _ALIKE.get(copy.dtype, 1e-4):
                raise RuntimeError(
                    f"`{name}`, of which every tensor-parallel rank holds a copy, differs between them after this step "
                    f"(by {difference:.2g} of its size). The step updates weights by numbers that are not the same on "
                    "all ranks: random ones that each draws for itself, or those that code beyond torch's functions "
                    "(NumPy, an extension) makes of the slices on one rank. Draw them alike, compute by functions of "
                    "torch, or use `tensor_parallel_size=1`."
                )


class StagesRun:
    """The user's code of manual optimization, once on every stage; see :class:`.WholeRun`.

    Each ``self.manual_backward(loss)`` ends a pass through the stages
    (:mod:`~lightning_megatron.pipeline.run.passes`), and then every stage has the gradients of its weights, summed over
    the replicas, and the number of the loss. Updates in between are the user's.

    Args:
        context: what steps run on, with several stages.
        stage: this rank's.
        cuts: compare what replicas write.
    """

    delivers = True

    def __init__(self, context: StepContext, stage: Stage, cuts: Cuts) -> None:
        self._module, self._mesh, self._device = context.module, context.mesh, context.device
        self._stages, self._stage, self._streams = context.stages, stage, context.streams
        self._gradients, self._recording, self._losses = context.gradients, context.recording, context.losses
        self._cuts, self.has_loss = cuts, self._mesh.rank == self._mesh.loss_rank
        self._schedule: Schedule | None = None
        self._passes: Passes | None = None
        self._deaf: _Deaf | None = None
        self._said, self._refusing = False, BackwardsByHand(_refused, nullcontext)
        self._taken = GradientsTaken(context.replicas_told)

    def choose(self, call: Callable[[Any], Any], batch: Any, *, first: bool) -> tuple[Any, Cut]:
        """The batch; replicas count alike, as nothing is tried of a step that updates."""
        self._say()
        self._stages.begin_training()
        self._cuts.begin()
        return batch, self._cuts.latest

    def drawing(self, batch: Any, name: str, *, training: bool) -> AbstractContextManager[None]:
        """Every pass is a micro-batch of its own."""
        return self._streams.step(training=training)

    @contextmanager
    def running(self, batch: Any, window: Accumulation) -> Iterator[None]:
        """Backwards come to :meth:`backward` meanwhile; a stage without the loss logs nothing."""
        if not self.has_loss:
            self._recording.recorder = self._deaf = _Deaf(self._module)
        with self._stages.running(batch, 1, training=True) as executor:
            self._schedule = self._schedule or self._stages.schedule(1, forward_only=False)
            around = self._stage, executor, self._streams, self._device, self._schedule, batch
            self._passes = Passes(*around, self._gradients.sink)
            with self._passes.running(), self._refusing, self._taken:
                yield
        self._passes = None

    def backward(self, loss: Tensor, autograd: Callable[[Tensor], None], window: Accumulation, scale: float) -> None:
        """End a pass: all stages run its backward. Then the loss is the number that it is, wherever it was not."""
        if self._passes is None:
            raise RuntimeError("`self.manual_backward` was called outside of a training step.")
        if self.has_loss:
            loss_of(loss)
            refuse_away(loss, "the loss given to `self.manual_backward`")
            self._losses.note([loss.detach()])
        sink = self._gradients.sink
        sink.begin(fresh=None, reduce=window.last, divide_by=self._mesh.layout.data, scale=scale)
        with self._refusing.allowed():
            self._passes.backward(loss, scale)
        sink.finish()
        number = torch.zeros((), dtype=torch.float64, device=self._device)
        if self.has_loss:
            number.copy_(loss.detach())
        number = self._stages.share(number)
        if type(loss) is Away:
            make_real(loss).data = number.to(loss.dtype).reshape(loss.shape)

    def leave_out(self, window: Accumulation) -> None:
        """Nothing: the step runs its backwards itself, or none."""

    def between_passes(self) -> AbstractContextManager[None]:
        """See :class:`~lightning_megatron.strategy.step.engine.StepEngine`."""
        return nullcontext() if self._passes is None else self._passes.outside()

    def check(self, outcome: Outcome) -> None:
        """Compare what was logged where the loss is with what this stage would have."""
        if self._deaf is not None:
            self._deaf.check({key.name for key in outcome.logs.keys})

    def _say(self) -> None:
        """One line about what this costs, once."""
        if not self._said:
            stages, self._said = self._mesh.layout.pipeline, True
            rank_zero_info(
                "manual optimization: a step may update in its middle, so each batch runs whole through the "
                f"{stages} pipeline stages, each of which is busy a {stages}th of the time; automatic optimization "
                "runs in micro-batches."
            )


class _Deaf(LogRecorder):
    """Takes what a stage without the loss logs: the stage with the loss logs it too."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__(module)
        self._names: set[str] = set()

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Note the name."""
        self._names.add(name)

    def check(self, logged: set[str]) -> None:
        """Compare with what the stage that computes the loss has ``logged``.

        Raises:
            RuntimeError: it has not logged something that this stage has.
        """
        if missing := sorted(self._names - logged):
            raise RuntimeError(
                f"the step logs `{missing[0]}` on a pipeline stage that does not compute the loss, and not on the one "
                "that does: it goes over what each stage has. Log it in `on_before_optimizer_step`, where what the "
                "stages log is put together, or use `pipeline_parallel_size=1`."
            )


def _refused() -> AbstractContextManager[None]:
    raise RuntimeError(
        "the step calls `.backward()` (or `torch.autograd.backward`) itself. Its gradients have to go back through the "
        "other pipeline stages: call `self.manual_backward(loss)` instead, or use `pipeline_parallel_size=1`."
    )
