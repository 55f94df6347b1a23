"""A step that runs its backwards itself, through the stages: its code runs once, the layers once in each pass.

With manual optimization a step goes on after a backward: it updates, and may call the layers again. So it is not cut
into micro-batches, of which each would update. Its code runs once on every stage, from its first line to its last, and
stops at a stage's boundaries only to send and to wait::

    stage 0     embed, layers 0 1 ─▶ stand-ins for the rest, loss and all ─▶ backward ◀─ ─▶ step(), layers 0 1 ─▶ ...
    stage 1     stand-ins ─▶ layers 2 3, head, loss ─────────────────────▶ ─ backward    ─▶ step(), stand-ins ─▶ ...

The calls of all layers up to a ``self.manual_backward(loss)`` are a pass: the schedule's instructions for one
micro-batch, of which the user's code is the computation of the forwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.mesh.draws.random_streams import SegmentStreams, collect_rng_state, restore_rng_state
from lightning_megatron.mesh.parts.packages import is_users
from lightning_megatron.mesh.watch import waits
from lightning_megatron.pipeline.elsewhere.away import STATE
from lightning_megatron.pipeline.elsewhere.presence import Part
from lightning_megatron.pipeline.elsewhere.provenance import Provenance
from lightning_megatron.pipeline.run.executor import PipelineExecutor, Program
from lightning_megatron.pipeline.run.pipeline_step import HearsFinal, PipelineStep
from lightning_megatron.pipeline.run.program import Action, Slot
from lightning_megatron.pipeline.run.sums_of_parts import SumsOfParts, parts_of
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.stage import order
from lightning_megatron.pipeline.stage.boundary import Boundary, StageRun
from lightning_megatron.pipeline.stage.calls import LayerCall
from lightning_megatron.pipeline.stage.order import StageDone
from lightning_megatron.pipeline.stage.stage import Stage

_LISTING = ("_own", "merge", "__call__", "parameters", "named_parameters")  # frames of :class:`.GuardedNames`


class Passes:
    """The passes of one step on one stage.

    Args:
        stage: this rank's.
        executor: carries tensors and runs backwards.
        streams: random streams per segment; each pass draws as a micro-batch of its own.
        device: where this rank computes.
        schedule: lowered, of one micro-batch.
        batch: the step's.
        gradients: told which gradients are the last of a pass.
    """

    def __init__(
        self,
        stage: Stage,
        executor: PipelineExecutor,
        streams: SegmentStreams,
        device: torch.device,
        schedule: Schedule,
        batch: Any,
        gradients: HearsFinal,
    ) -> None:
        self._stage, self._cursor, self._executor = stage, stage.cursor, executor
        self._streams, self._device, self._schedule, self._batch = streams, device, schedule, batch
        self._gradients = gradients
        self._layers = len(stage.partition.trunk.layer_names)
        self._bounds = [
            stage.partition.bounds[schedule.virtual_stage(stage.stage, chunk)] for chunk in range(schedule.chunks)
        ]
        self._bounds.sort()
        self._arrivals: list[Boundary] = []
        self._received: list[Tensor] = []  # of them, for the tracer
        self._tracer: Provenance | None = None
        self._number, self._called = 0, 0
        self.is_between = self._listed = False
        self._pass: _Pass | None = None
        names, part_of = stage.partition.trunk.layer_names, stage.presence.part_of
        self._sums = SumsOfParts(parts_of(stage.module, names, lambda name: _single(part_of(name))), _calls_step)

    @property
    def _running(self) -> _Pass:
        if self._pass is None:
            raise RuntimeError("no pass has begun")
        return self._pass

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the user's code."""
        done = self._cursor.trace_plan.is_done
        if not all(done(bounds, _name(0)) for bounds in self._bounds):
            stage = self._stage
            self._tracer = Provenance(stage.module, stage.presence, self._received, lambda: stage.is_behind_layers)
        self._cursor.passes = self
        self._begin()
        try:
            with self._tracer or nullcontext(), self._sums:
                yield
        finally:
            self._cursor.passes = None
            self._cursor.end()
            if self._pass is not None:
                self._pass.forget()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Around code that is not the step's own: hooks around an update."""
        running, self._cursor.running = self._cursor.running, False
        follows, self._sums.active = self._sums.active, False
        try:
            with self._tracer.paused() if self._tracer is not None else nullcontext():
                yield
        finally:
            self._cursor.running, self._sums.active = running, follows

    def _begin(self) -> None:
        """Be ready for the code before a pass, in which parts before the layers are used."""
        self._called = 0
        self._cursor.begin(self._bounds[0], self._number, Boundary(), _name(self._number), self._tracer_of(0))

    def _tracer_of(self, piece: int) -> Provenance | None:
        done = self._cursor.trace_plan.is_done(self._bounds[piece], _name(self._number))
        return None if done else self._tracer

    def call_layer(self, index: int, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of trunk layer ``index``.

        Raises:
            RuntimeError: layers are called again before the backward of their first call.
        """
        if index < self._called:
            order.refuse_again(f"layer {index} of `{self._stage.partition.trunk.name}`")
        if self._pass is None and index == 0:
            self._open()
        try:
            output = self._cursor.follow(index, call, args, kwargs)
        except StageDone:
            self._hand_on(index)
            return self.call_layer(index, call, args, kwargs)
        self._called = index + 1
        if self._tracer is not None:  # where a stand-in has become what arrived, it is the stand-in
            self._received[:] = [tensor for arrived in self._arrivals for tensor in arrived.tensors]
        if self._cursor.first == self._layers and self._called == self._layers:
            self._streams.enter(self._number, 1 + self._layers)  # as on the stage that has the last layer
        return output

    def note_read(self) -> None:
        """Note that user code has iterated over all parameters of this stage.

        Code of torch and of this package, for a norm or to clear gradients, handles that correctly and is not noted.
        """
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_name in _LISTING:
            frame = frame.f_back
        self._listed = self._listed or is_users(frame)

    def _check_listed(self) -> None:
        if self._listed:
            raise RuntimeError(
                "the step goes over all parameters between two of its backwards. Under a pipeline each stage has only "
                "its own, so a sum over them in the next loss would be wrong. Do it after the last "
                "`self.manual_backward` or in `on_train_batch_end`, or use `pipeline_parallel_size=1`; to clip, hand "
                "`self.parameters()` to `clip_grad_norm_` itself, or call `self.clip_gradients`."
            )

    def _open(self) -> None:
        """Start a pass, up to the forward of this rank's first piece."""
        self._check_listed()
        self.is_between = False
        self._sums.switch(False)
        name = _name(self._number)
        scales = [1.0] * (self._number + 1)
        step = PipelineStep(self._schedule, _not_called, [self._batch], name, scales, self._gradients)
        self._cursor.running = False  # what goes over the parameters now is not the step
        self._pass = _Pass(self._executor, step)
        self._cursor.running = True
        self._go_to_piece()

    def _go_to_piece(self) -> None:
        """Wait for what the next piece of this rank receives."""
        received = self._running.next_forward() or Boundary()
        self._arrivals.append(received)
        self._cursor.received, self._cursor.stand_ins.told = received, received.forms

    def _hand_on(self, index: int) -> None:
        """End the present piece at its boundary: send what the next one receives, and go on with stand-ins."""
        cursor = self._cursor
        if cursor.sent.effects is not None:
            self._refuse_effects()
        bounds = (cursor.first, cursor.stop)
        if self._tracer is not None:
            cursor.trace_plan.note_run(bounds, cursor.where)
        self._running.keep(StageRun(self._number, cursor.received, cursor.sent))
        piece = self._bounds.index(bounds) + 1
        state = collect_rng_state(self._device)
        if piece == len(self._bounds):
            self._running.next_forward()  # there is none: what was computed is sent
            nowhere = (self._layers, self._layers)
            cursor.begin(nowhere, self._number, Boundary(), _name(self._number), called=index)
        else:
            tracer = self._tracer_of(piece)
            cursor.begin(self._bounds[piece], self._number, Boundary(), _name(self._number), tracer, called=index)
            self._go_to_piece()
        restore_rng_state(state, self._device)

    def _refuse_effects(self) -> None:
        raise RuntimeError(
            f"layers of `{self._stage.partition.trunk.name}` leave something behind besides their output (an "
            "attribute, an entry of a list, a hook), which manual optimization does not tell the other pipeline "
            "stages. Return it from the layers and pass it through them, set `self.automatic_optimization = True`, or "
            "use `pipeline_parallel_size=1`."
        )

    def backward(self, loss: Tensor, scale: float) -> None:
        """End the pass: run its backwards; without a pass, that of a loss that no layer has part in.

        Args:
            loss: on the stage that computes it, with its graph.
            scale: its factor.

        Raises:
            RuntimeError: not all layers were called.
        """
        self._sums.switch(False)
        written, STATE.written = STATE.written, []  # they stay stand-ins for the rest of the step
        try:
            self._end_pass(loss, scale)
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                _refuse_second(None)
            raise
        self._received.clear()
        self._arrivals.clear()
        STATE.written = written
        self._number += 1
        self._begin()
        self.is_between, self._listed = True, False
        self._sums.switch(True)

    def _end_pass(self, loss: Tensor, scale: float) -> None:
        if self._pass is None:
            self._check_listed()
            if self._bounds[-1][1] == self._layers and loss.requires_grad:
                torch.autograd.backward(loss, torch.full_like(loss, scale, requires_grad=False))
        else:
            if self._called < self._layers:
                self._cursor.check_finished(loss)
            if self._bounds[-1][1] == self._layers:
                bounds = (self._cursor.first, self._cursor.stop)
                run = StageRun(self._number, self._cursor.received, Boundary(), loss)
                if self._cursor.side_effects.pack() is not None:
                    self._refuse_effects()
                if self._tracer is not None:
                    self._cursor.trace_plan.note_run(bounds, self._cursor.where)
                self._pass.keep(run)
            self._pass.run_backwards(scale)
            self._pass = None


class _Pass:
    """The instructions of this rank for one pass.

    Args:
        executor: has them.
        step: of one micro-batch.
    """

    def __init__(self, executor: PipelineExecutor, step: PipelineStep) -> None:
        self._executor, self._step = executor, step
        program = executor.begin(step)
        self._forwards = iter([entry for entry in program if not entry[1].is_of_backward])
        self._backwards: Program = [entry for entry in program if entry[1].is_of_backward]
        self._slot = program[0][1]
        self._arrived: list[Tensor] = []
        self._no_gradient: set[tuple[int, int]] = set()  # places to whose outputs no backward comes
        self._stops_at: set[tuple[int, int]] = set()  # places whose backward does not come to their inputs

    def next_forward(self) -> Boundary | None:
        """Run what comes before the next forward; what that receives, or ``None`` if there is none left."""
        with waits.within(self._executor.told):
            for act, slot in self._executor.followed(self._forwards):
                if slot.action is Action.FORWARD:
                    self._slot = slot
                    return self._executor.received(slot)
                act(slot)
        return None

    def keep(self, run: StageRun) -> None:
        """End a forward and keep what its backward needs."""
        self._executor.keep(self._slot, run)
        self._arrived += run.received.tensors

    def run_backwards(self, scale: float) -> None:
        """Run everything else. Before each gradient goes whether there is one: what no backward comes to keeps the
        gradients that it has, which may be none.
        """
        self._step.loss_scales = [scale] * len(self._step.loss_scales)
        executor, links = self._executor, self._executor.links
        put_off: dict[tuple[int, int], tuple[Callable[[Slot], None], Slot]] = {}
        with waits.within(executor.told):
            for act, slot in executor.followed(self._backwards):
                place, action = slot.place, slot.action
                if action is Action.POST_BACKWARD:
                    put_off[place] = act, slot
                    continue
                if action is Action.WAIT_BACKWARD:
                    post, posted = put_off.pop(place)
                    if not links.receive_object(posted.peer, posted.tag):
                        self._no_gradient.add(place)
                    post(posted)
                if action is Action.SEND_BACKWARD:
                    links.send_object(slot.peer, place not in self._stops_at, slot.tag)
                if action in (Action.BACKWARD, Action.BACKWARD_INPUT):
                    self._run_backward(act, slot)
                elif action is not Action.POST_BACKWARD_EARLY and not self._left_out(slot):
                    act(slot)
        executor.links.finish()
        executor.end()
        for tensor in self._arrived:
            if tensor.requires_grad:
                tensor.register_hook(_refuse_second)

    def _left_out(self, slot: Slot) -> bool:
        return slot.action is Action.BACKWARD_WEIGHT and slot.place in self._no_gradient

    def _run_backward(self, act: Callable[[Slot], None], slot: Slot) -> None:
        received = self._executor.runs[slot.place].received
        if slot.place in self._no_gradient:
            self._executor.leave_out(slot)
        else:
            act(slot)
        if not received.reached:
            self._stops_at.add(slot.place)
            if slot.onward is not None:
                self._no_gradient.add(slot.onward)

    def forget(self) -> None:
        """Drop everything, after an error."""
        self._executor.end()


def _calls_step(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_call_step"


def _single(part: Part | None) -> str | None:
    """Name of a part that one stage has."""
    return part.name if part is not None and len(part.stages) == 1 else None


def _name(number: int) -> str:
    """Of a pass: the first runs under the name of the step."""
    return "training_step" if number == 0 else f"training_step (pass {number})"


def _not_called(batch: Any, index: int) -> Any:
    raise AssertionError("the user's step runs by itself")


def _refuse_second(gradient: Tensor | None) -> None:
    raise RuntimeError(
        "a loss given to `self.manual_backward` depends on what the step computed before the `self.manual_backward` in "
        "front of it, whose activations are gone from the pipeline. Add the losses and call it once, detach what goes "
        "on, or use `pipeline_parallel_size=1`."
    )
