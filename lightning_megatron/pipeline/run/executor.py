"""Runs this rank's list of instructions; knows no schedule by name.

One step is one :class:`PipelineStep` handed to :meth:`PipelineExecutor.run`. The list has been worked out beforehand
(:mod:`~lightning_megatron.pipeline.run.program`), so running it is a loop over methods, one per action. What a forward
leaves for its backward is held in a table keyed by (chunk, micro-batch) and dropped as soon as the backward has run, so
the activations in flight are exactly those that the schedule's checker counts. A module that is not cut runs here too,
as the only stage of its pipeline: its program is F0 B0 F1 B1 ... without transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_megatron.mesh.batches import map_tensors, shape_signature
from lightning_megatron.mesh.watch import waits
from lightning_megatron.pipeline.forwards.factors import Factors, add_up
from lightning_megatron.pipeline.forwards.weight_gradients import WeightGradients
from lightning_megatron.pipeline.run.around import Around
from lightning_megatron.pipeline.run.clock import StepClock
from lightning_megatron.pipeline.run.finality import Final, Finality
from lightning_megatron.pipeline.run.links import StageLinks, Transfer
from lightning_megatron.pipeline.run.moves import Move, Program, bind
from lightning_megatron.pipeline.run.pipeline_step import PipelineStep, RunsStep, trained_loss_of
from lightning_megatron.pipeline.run.program import Action, Slot, compile_stage
from lightning_megatron.pipeline.run.unreached import Unreached
from lightning_megatron.pipeline.schedules.instructions import Kind, Schedule
from lightning_megatron.pipeline.stage.boundary import Announcement, Boundary, Leaf, StageRun

Place = tuple[int, int]


class PipelineExecutor:
    """Executes the instructions of one stage, in the order of its schedule; never decides an order itself.

    Invariants: a place is a pair (chunk, micro-batch). ``runs[place]`` holds a forward's graph from its forward until
    its backward, so ``len(runs)`` is the number of activations in flight. All ranks of a tensor group hold the same
    schedule and run the same actions in the same order, because layers contain collectives. When `run` returns or
    raises, nothing of the step is kept.

    Args:
        stage: runs the user's step on this rank.
        links: transfers to the other stages.
        finality: knows in which backward the gradients of a parameter are complete.
        variable_shapes: send the shapes along with every boundary instead of only for new micro-batch shapes.
        clock: records when each computation of a training step starts and ends.

    Attributes:
        stage: as given.
        step: what is run now.
    """

    step: PipelineStep

    def __init__(
        self,
        stage: RunsStep,
        links: StageLinks,
        finality: Finality,
        variable_shapes: bool = False,
        clock: StepClock | None = None,
    ) -> None:
        self.stage = stage
        self.links = links
        self._finality = finality
        self._variable_shapes = variable_shapes
        self._clock = clock
        self._sent: dict[Any, Announcement] = {}
        self._received: dict[Any, Announcement] = {}
        self._varying: set[Any] = set()  # keys of boundaries that tell, each time, what layers have left behind
        self._trained = (-1.0, -1.0)
        self._unreached = Unreached(looks_always=variable_shapes or links.on_cpu)
        self._split: frozenset[Place] = frozenset()
        self._programs: dict[int, tuple[frozenset[Place], Program, Schedule]] = {}  # by the schedule's id
        self._weights: WeightGradients | None = None
        self.runs: dict[Place, StageRun] = {}
        self._slot: Slot | None = None

    def expect_gradients(self, arriving: float, leaving: float) -> None:
        """Forget what crosses boundaries if an epoch began, or parameters were frozen or hooks came up to this stage.

        Args:
            arriving: number that stands for the epoch, the parameters of the stages before that train, and their hooks.
            leaving: the same, with this stage's.
        """
        if (arriving, leaving) == self._trained:
            return
        if arriving != self._trained[0]:
            self._received.clear()
            self._unreached.forget(heard=False)
        if leaving != self._trained[1]:
            self._sent.clear()
            self._unreached.forget(heard=True)
        self._trained = (arriving, leaving)

    def run(self, step: PipelineStep) -> None:
        """Run ``step``; returns when this rank's instructions are done and its sends have left."""
        program = self.begin(step)
        if step.goes_on is not None:  # of one micro-batch, all forwards may run before all backwards
            program = sorted(program, key=lambda entry: entry[1].is_of_backward)
        with ExitStack() as stack:
            stack.callback(self.end)
            stack.enter_context(waits.within(self.told))
            if self._clock is not None and step.training:
                self._clock.run(step.schedule, self.followed(program))
            elif step.goes_on is not None:
                for act, slot in self.followed(program):
                    act(slot)
            else:  # the same, without asking before each
                for act, self._slot in program:
                    act(self._slot)
            self._slot = None
            self._unreached.settle()
            self.links.finish()

    def begin(self, step: PipelineStep) -> Program:
        """Prepare for ``step``; what this rank has to do in it. :meth:`run` does it; who does it himself ends with
        :meth:`end`.
        """
        self.stage.schedule, self.stage.leaves_out = step.schedule, step.may_be_left_out
        self._split, program = self._program(step.schedule, announces=step.whole is None)
        self._begin(step)
        return program

    def end(self) -> None:
        """Drop everything that belongs to one step."""
        self._begin(PipelineStep(self.step.schedule, self.step.call, (), self.step.name))
        self._slot = None
        if self._split:
            self._weight_gradients().switch(False)

    def _begin(self, step: PipelineStep) -> None:
        self.step = step
        self._unreached.drop()
        self._last = step.schedule.virtual_stages - 1
        self._signatures: dict[int, Any] = {}
        self.runs = {}
        self._inputs: dict[Place, Boundary] = {}
        self._roots: dict[Place, list[Any]] = {}
        self._output_grads: dict[Place, list[Tensor | None]] = {}
        self._input_grads: dict[Place, tuple[list[Tensor], bool]] = {}
        self._factors: dict[Place, list[Factors]] = {}
        self._arriving: dict[tuple[int, Place], tuple[Transfer, Sequence[Leaf]]] = {}
        self._heard: dict[Place, Announcement] = {}
        self._around: Around | None = None
        if step.whole is not None:
            stage: Any = self.stage
            self._around = Around(stage, step.whole, step.micro_batches, step.name, training=step.training)

    def _weight_gradients(self) -> WeightGradients:
        if self._weights is None:
            self._weights = WeightGradients(self.stage.owned_layers())
        return self._weights

    def _program(self, schedule: Schedule, *, announces: bool) -> tuple[frozenset[Place], Program]:
        """Compile the instructions of this stage into a list of calls, once per schedule.

        The schedule says only what is computed when. Here the transfers that follow from it are put in, receives are
        posted as early as their shapes are known (so that a message never waits for its receiver), and around every
        backward in which some gradients become final stands an announcement of which: their sums over replicas start
        then, under the backwards still to come. The table holds the schedule, because its id may be reused otherwise.
        Nothing is announced where a backward of the code before the layers follows all of them.

        Returns:
            The (chunk, micro-batch) places whose backward is split into input and weight gradients, and the calls.
        """
        known = self._programs.get(id(schedule))
        if known is not None:
            return known[:2]
        actions: dict[Action, Callable[[Slot], None]] = {
            action: getattr(self, f"_{action.name.lower()}") for action in Action if action is not Action.FINAL
        }
        early = self.links.posts_ahead and not self._variable_shapes
        steps = schedule.instructions[self.stage.stage]
        split = frozenset((step.chunk, step.micro_batch) for step in steps if step.kind is Kind.BACKWARD_WEIGHT)
        slots = compile_stage(schedule, self.stage.stage, post_early=early)
        finals: Mapping[int, Final] = {}
        if announces:
            finals = self._finality.after(schedule, self._weight_gradients().parameters if split else frozenset())
        program = bind(slots, actions, finals, self.announce)
        self._programs[id(schedule)] = (split, program, schedule)
        return split, program

    def announce(self, final: Final, slot: Slot | None = None) -> None:
        """Tell the gradient buckets which of the gradients that arrive from now on are the last of the step."""
        if self.step.gradients is not None:
            self.step.gradients.set_final(final)

    def _switch_linears(self, place: Place) -> None:
        """Let them be split if the backward of ``place`` is."""
        if self._split:
            self._weight_gradients().switch(place in self._split)

    def _forward(self, slot: Slot) -> None:
        step, received = self.step, self.received(slot)
        batch = step.micro_batches[slot.micro_batch]
        if self._around is None:
            self.keep(slot, self.stage.run(slot.virtual, slot.micro_batch, step.call, batch, received, step.name))
        elif (run := self._run_layers(self._around, slot, batch, received)) is not None:
            self.keep(slot, run)

    def received(self, slot: Slot) -> Boundary:
        """The received tensors from which the forward of ``slot``, which is about to run, goes on."""
        self._switch_linears(slot.place)
        return self._inputs.pop(slot.place, None) or Boundary()

    def keep(self, slot: Slot, run: StageRun) -> None:
        """Keep what a forward has left for its backward, and for the piece that follows."""
        step, place, training = self.step, slot.place, self.step.training
        if slot.virtual == self._last:
            if training:
                self.runs[place] = run
            else:
                step.outputs[slot.micro_batch] = run.output
            return
        if training or slot.onward is None:
            self.runs[place] = run
        if training:
            self._roots[place] = [get_gradient_edge(tensor) for tensor in run.sent.tensors if tensor.requires_grad]
        if slot.onward is not None:
            if not training:
                self._sent[self._key(slot, slot.virtual + 1)] = Announcement(run.sent.leaves)
            writes = self.stage.may_write(slot.virtual + 1, step.name)
            self._inputs[slot.onward] = run.sent.handed_on(writes=writes, training=training)
            run.sent = Boundary(run.sent.leaves)

    def _run_layers(self, around: Around, slot: Slot, batch: Any, received: Boundary) -> StageRun | None:
        """Forward of a micro-batch where only layers run in micro-batches; keeps, or joins, what the last one gives."""
        step, place, last = self.step, slot.place, slot.virtual == self._last
        known = self._sent.get((*self._key(slot, slot.virtual + 1)[:-1], False))
        at, leaves = (slot.virtual, slot.micro_batch), None if known is None else known.leaves
        run = around.run(at, step.call, batch, received, ends=last, leaves=leaves)
        if last:
            around.leave(slot.micro_batch, run)
            if step.training:
                self.runs[place] = run
                self._roots[place] = [get_gradient_edge(tensor) for tensor in run.sent.tensors if tensor.requires_grad]
                run.sent = Boundary(run.sent.leaves)
            elif around.is_complete:
                around.try_behind(step.outputs)
        return None if last else run

    def _backward(self, slot: Slot) -> None:
        place, around = slot.place, self._around
        self._switch_linears(place)  # for layers that are recomputed
        if around is not None and slot.virtual == self._last:
            if around.is_complete:
                output = around.behind(self._backward_from_loss)
                self.step.outputs[0] = map_tensors(output, torch.detach)
            self._output_grads[place] = around.gradients(slot.micro_batch)
        run = self.runs.pop(place)
        self.stage.resume(slot.virtual, run)
        if slot.virtual == self._last and around is None:
            self._backward_from_loss(run)
            self.step.outputs[run.micro_batch] = map_tensors(run.output, torch.detach)
        else:
            self.step.differentiate(run, self._roots.pop(place), self._output_grads.pop(place))
        self.stage.end()
        self._hand_back(slot, run)

    def leave_out(self, slot: Slot) -> None:
        """Instead of a backward: nothing depends on what this forward gave."""
        run = self.runs.pop(slot.place)
        self._roots.pop(slot.place, None)
        self._output_grads.pop(slot.place, None)
        self._hand_back(slot, run)

    def _hand_back(self, slot: Slot, run: StageRun) -> None:
        """Keep the gradients of what a forward received for the piece before."""
        if slot.virtual == 0:
            if self._around is not None:
                self._around.take(slot.micro_batch, run.received, self.step.differentiate)
            return
        if slot.onward is not None:
            self._output_grads[slot.onward] = run.received.gradients()
        else:
            told = self._unreached.to_send(partial(self._key, slot, slot.virtual), run.received.with_gradients())
            self._input_grads[slot.place] = told, run.received.leaves[0].requires_grad

    def _backward_from_loss(self, run: StageRun) -> None:
        loss = trained_loss_of(run.output)
        scale = torch.full_like(loss, self.step.loss_scales[run.micro_batch], requires_grad=False)
        self.step.differentiate(run, [loss], [scale])

    def _backward_input(self, slot: Slot) -> None:
        queue: list[Factors] = []
        with self._weight_gradients().putting_off(queue):
            self._backward(slot)
        self._factors[slot.place] = queue

    def _backward_weight(self, slot: Slot) -> None:
        with self.step.backwards():
            add_up(self._factors.pop(slot.place))

    def _key(self, slot: Slot, virtual: int) -> Any:
        signature = self._signatures.get(slot.micro_batch)
        if signature is None:
            signature = self._signatures[slot.micro_batch] = shape_signature(self.step.micro_batches[slot.micro_batch])
        return (virtual, self.step.name, self.step.may_be_left_out, signature, self._around is not None)

    def _send_forward(self, slot: Slot) -> None:
        training = self.step.training
        run = self.runs[slot.place] if training else self.runs.pop(slot.place)
        sent = run.sent.leaves
        leaves = sent if training else tuple(replace(leaf, requires_grad=False) for leaf in sent)
        told = Announcement(leaves, run.sent.effects, run.sent.forms)
        key = self._key(slot, slot.virtual + 1)
        tells = self._variable_shapes or self.step.may_be_left_out or told.effects is not None
        known = None if tells else self._sent.get(key)
        if known is None:
            self.links.send_object(slot.peer, told, slot.tag)
            self._sent[key] = told
        else:
            known.check(told)
        self.links.send(slot.peer, run.sent.tensors, slot.tag, scatter=True)
        run.sent = Boundary(run.sent.leaves)  # the transfer keeps them alive until it is done; backward has its roots

    def _send_backward(self, slot: Slot) -> None:
        grads, scatter = self._input_grads.pop(slot.place)
        self.links.send(slot.peer, grads, slot.tag, scatter=scatter)

    def _post_forward_early(self, slot: Slot) -> None:
        known = None if (key := self._key(slot, slot.virtual)) in self._varying else self._received.get(key)
        if known is not None and not self.step.may_be_left_out:
            self._heard[slot.place] = known
            self._post(slot, 0, known.leaves, scatter=True)

    def _post_backward_early(self, slot: Slot) -> None:
        if slot.place in self.runs:
            self._post_backward(slot)

    def _post_forward(self, slot: Slot) -> None:
        """Post a receive. Shapes not known yet come first and are waited for; the sender waits for nobody."""
        if (0, slot.place) in self._arriving:
            return
        key = self._key(slot, slot.virtual)
        if self._variable_shapes or self.step.may_be_left_out or key not in self._received or key in self._varying:
            told = self._heard[slot.place] = self.announced(slot)
            if told.effects is not None:
                self._varying.add(key)
            self._received[key] = told._replace(effects=None)
        else:
            told = self._heard[slot.place] = self._received[key]
        self._post(slot, 0, told.leaves, scatter=True)

    def announced(self, slot: Slot) -> Announcement:
        """The previous stage's announcement of what it will send. Blocks until it has arrived."""
        told: Announcement = self.links.receive_object(slot.peer, slot.tag)
        return told

    def _post_backward(self, slot: Slot) -> None:
        if (1, slot.place) not in self._arriving:
            leaves = self.runs[slot.place].sent.leaves
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            self._post(slot, 1, wanted, scatter=leaves[0].requires_grad)

    def _post(self, slot: Slot, direction: int, leaves: Sequence[Leaf], *, scatter: bool) -> None:
        """Post a receive; the hidden state, which comes first, may come in parts, other values come whole."""
        shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        transfer = self.links.receive(slot.peer, shapes, slot.tag, scatter=scatter)
        self._arriving[direction, slot.place] = (transfer, leaves)

    def _wait_forward(self, slot: Slot) -> None:
        transfer, leaves = self._arriving.pop((0, slot.place))
        tensors = transfer.wait()
        for tensor, leaf in zip(tensors, leaves, strict=True):
            tensor.requires_grad_(leaf.requires_grad)
        told = self._heard.pop(slot.place)
        self._inputs[slot.place] = Boundary(tuple(leaves), tensors, effects=told.effects, forms=told.forms)

    def followed(self, program: Iterable[Move]) -> Iterator[Move]:
        """The program, noting where in it this rank is; without backwards, where the step does not go on to them."""
        asks = self.step.goes_on
        for act, slot in program:
            if asks is not None and slot.is_of_backward:
                if not asks():
                    return
                asks = None
            self._slot = slot
            yield act, slot

    def told(self) -> waits.Waiting | None:
        """The instruction at work, in words."""
        slot = self._slot
        return None if slot is None or slot.action is Action.FINAL else waits.Waiting(slot.in_words())

    def _wait_backward(self, slot: Slot) -> None:
        tensors, key_of = self._arriving.pop((1, slot.place))[0].wait(), partial(self._key, slot, slot.virtual + 1)
        self._output_grads[slot.place] = self._unreached.received(key_of, tensors)
