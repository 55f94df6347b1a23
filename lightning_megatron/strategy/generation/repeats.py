"""Finds the steps of evaluation that call the model repeatedly, and runs them under a pipeline.

An ordinary step ends on each stage after its last layer. One that calls the layers again needs what the model gives on
every stage, so all of its calls become passes through all stages (:mod:`lightning_megatron.pipeline.repeated`). Such
a step is recognised by its code (a call of ``.generate``), or when it calls the layers a second time: then what it has
done so far is undone, and it starts over::

    last stage     forward, forward: again! ──▶ told with the outcome ─▶ start over: passes
    other stages   forward                      hear it               ─▶ start over: passes
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.mesh.batches import map_tensors
from lightning_megatron.mesh.draws.one_stream import OneStream
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.parts.packages import FRAMEWORKS, comes_from
from lightning_megatron.pipeline.elsewhere.away import refuse_away
from lightning_megatron.pipeline.repeated.model_calls import ModelCalls
from lightning_megatron.pipeline.repeated.with_gradients import TrainingFollower
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep, trained_loss_of
from lightning_megatron.pipeline.stage.stage import Stage
from lightning_megatron.strategy.generation.middle import Exchanged
from lightning_megatron.strategy.loss.traces import Traces

_GENERATES = re.compile(r"\.generate\(")
CALLS = re.compile(r"\bself\.(\w+)\(")


class StartOver:
    """The outcome of a step that turned out to call the layers again."""


class Attempt:
    """A step that may have to be started over, and the state of the module before it.

    Args:
        module: the user's.
        beside: whether state outside of the module is put back too.
    """

    def __init__(self, module: pl.LightningModule, *, beside: bool = False) -> None:
        self._traces = Traces(module, beside=beside)

    def noting(self) -> AbstractContextManager[None]:
        """Around the step: weights that it writes are taken back too."""
        return self._traces.noted()

    def take_back(self) -> None:
        """Leave the module as it was."""
        with torch._C.DisableTorchFunction():
            self._traces.put_back()


class Repeats:
    """The steps of a module that call it repeatedly.

    Args:
        module: the user's, cut.
        stage: this rank's part of it.
        mesh: the grid.

    Attributes:
        model_calls: runs each call of the model through all stages.
    """

    def __init__(self, module: pl.LightningModule, stage: Stage, mesh: ParallelMesh) -> None:
        self._module, self._stage = module, stage
        self.model_calls = ModelCalls.of(module, stage)
        self.model_calls.connect(mesh)
        self._last = mesh.rank == mesh.loss_rank
        self._known: dict[str, bool] = {}

    def includes(self, name: str) -> bool:
        """Whether the step of this name is known to call the model repeatedly; equal on all ranks."""
        if name not in self._known:
            self._known[name] = generates(type(self._module), name)
        return self._known[name]

    def attempt(self, name: str) -> Attempt | None:
        """State to start a step over from; ``None`` where that is known not to happen."""
        return None if self.includes(name) else Attempt(self._module)

    def note(self, name: str) -> None:
        """Note that the step of this name has called the layers again."""
        self._known[name] = True
        if name == "training_step":
            rank_zero_info(
                "`training_step` calls the layers more than once: it runs on every pipeline stage, and each call of a "
                "layer goes through all stages, as do its gradients."
            )
            return
        rank_zero_info(
            f"`{name}` calls the model repeatedly. It was started over, and runs on every pipeline stage from now on: "
            "each call goes through all stages, and every stage gets what the model gives."
        )

    def run(self, step: PipelineStep, undone: Callable[..., Any]) -> None:
        """Run a step, each of whose calls of the model goes through all stages; fills its outputs.

        Args:
            step: of evaluation.
            undone: a context that takes back what is written to the module, for the stages that hear of it from the one
                that computes the loss.
        """
        with self.model_calls.running(), nullcontext() if self._last else undone(hooks=False):
            for index, part in enumerate(step.micro_batches):
                output = step.call(part, index)
                if self._last:
                    refuse_away(output, f"what `{step.name}` returned")
                step.outputs[index] = output

    @property
    def follower(self) -> TrainingFollower:
        """Answers the calls of a training step."""
        return self.model_calls.of_training

    @property
    def is_between_calls(self) -> bool:
        """Whether code runs that all stages run, and no layer or part of one stage."""
        return self._stage.repeats and not self.follower.answers

    def try_on(self, step: PipelineStep, streams: SegmentStreams) -> None:
        """Run a training step without its backwards; fills its outputs.

        Args:
            step: of a trial, which takes back what it writes.
            streams: random streams per segment.
        """
        for index, part in enumerate(step.micro_batches):
            with self.model_calls.training(streams) as follower:
                follower.begin(index)
                step.outputs[index] = step.call(part, index)

    def train(
        self,
        step: PipelineStep,
        undone: Callable[..., Any],
        streams: SegmentStreams | OneStream,
        turns: Exchanged | None = None,
        asides: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
    ) -> None:
        """Run a training step likewise, with its backwards; fills its outputs.

        Args:
            step: of training.
            undone: see :meth:`run`.
            streams: random streams per segment, or the only one.
            turns: what micro-batches exchange that take turns, as many at once as there are stages; ``None`` where
                one runs after the other.
            asides: further contexts around what others do in the middle of one.
        """
        with self.model_calls.training(streams) as follower, nullcontext() if self._last else undone(hooks=False):
            tasks = [partial(self._train_on, step, follower, index) for index in range(len(step.micro_batches))]
            if turns is not None and isinstance(streams, SegmentStreams):
                turns.begin()
                self.model_calls.micro_batches(tasks, [streams.elsewhere, turns.elsewhere, *asides])
                return
            for task in tasks:
                task()

    def _train_on(self, step: PipelineStep, follower: TrainingFollower, index: int) -> None:
        """Forward and backward of a micro-batch."""
        follower.begin(index)
        output = step.call(step.micro_batches[index], index)
        if self._last:
            refuse_away(output, "what `training_step` returned")
        if output is not None or step.goes_on is None:
            with step.backwards():
                follower.backward(trained_loss_of(output), step.loss_scales[index])
            step.outputs[index] = map_tensors(output, torch.detach)

    @staticmethod
    def say_turns(why: str, stages: int, parts: int) -> None:
        """Say how batches of a training step that calls the layers more than once run.

        Args:
            why: they run whole; "" if their micro-batches take turns.
            stages: of the pipeline.
            parts: how many micro-batches a batch has.
        """
        if why:
            rank_zero_info(
                f"each batch of a `training_step` that calls the layers more than once runs whole, and one of the "
                f"{stages} stages computes at a time: {why}."
            )
        else:
            rank_zero_info(
                f"the {parts} micro-batches of a `training_step` that calls the layers more than once take turns: as "
                f"many of them as there are stages ({stages}) run at once, so that all stages compute."
            )

    def take_log(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of ``self.log`` belongs to another stage; see :class:`LogRecorder`."""
        return self.model_calls.refuse_log() or self._stage.cursor.side_effects.take_log(args, kwargs)


def generates(kind: type, name: str) -> bool:
    """Whether a method, or one of the same class that it calls, calls a method ``generate`` of anything."""
    return any(_GENERATES.search(source) for source in sources(kind, name))


def sources(kind: type, name: str) -> list[str]:
    """The code of a method, and of those of the same class that it calls; "" for what has none."""
    seen: set[str] = set()
    todo, found = [name], []
    while todo:
        method = todo.pop()
        function = getattr(kind, method, None)
        if method in seen or not callable(function):
            continue
        seen.add(method)
        if comes_from(function, *FRAMEWORKS):
            continue
        found.append(_source_of(function))
        todo += CALLS.findall(found[-1])
    return found


def _source_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""
