"""Runs this rank's list of instructions; knows no schedule by name.

One step is one :class:`Step` handed to :meth:`PipelineExecutor.run`. Each instruction kind has one method. What a
forward
leaves for its backward is held in a table keyed by (chunk, micro-batch) and dropped the moment the backward has run, so
the activations in flight are exactly those that the schedule's checker counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron.pipeline.cursor import Boundary, Leaf, StageRun
from lightning_megatron.pipeline.micro_batches import map_tensors, shape_signature
from lightning_megatron.pipeline.p2p import StageLinks, Transfer
from lightning_megatron.pipeline.schedule import Instruction, Kind, Schedule
from lightning_megatron.pipeline.stage import StageModule


class GradientSink(Protocol):
    """What the executor tells the gradient engine."""

    def set_final(self, final: bool) -> None:
        """Say whether gradients that arrive from now on are the last of this step."""


@dataclass
class Step:
    """One step to run through the pipeline.

    Attributes:
        schedule: lowered schedule.
        call: the user's step, taking a micro-batch and its number.
        micro_batches: the batch, cut; the same on every stage.
        loss_scales: factor of each micro-batch's loss in backward; ``None`` for evaluation.
        outputs: filled on the stage that computes the loss: the step's return value per micro-batch, detached.
    """

    schedule: Schedule
    call: Callable[[Any, int], Any]
    micro_batches: Sequence[Any]
    loss_scales: Sequence[float] | None = None
    outputs: dict[int, Any] = field(default_factory=dict)

    @property
    def training(self) -> bool:
        """Whether backwards run."""
        return self.loss_scales is not None


class PipelineExecutor:
    """Executes schedules on one stage.

    Args:
        stage: this rank's part of the module.
        links: transfers to the other stages; ``None`` with one stage.
        device: device of the loss scale.
        variable_shapes: send the shapes along with every boundary instead of only for new micro-batch shapes.
    """

    def __init__(
        self,
        stage: StageModule,
        links: StageLinks | None,
        device: torch.device,
        variable_shapes: bool = False,
    ) -> None:
        self._stage = stage
        self._links = links
        self._device = device
        self.gradients: GradientSink | None = None
        self._variable_shapes = variable_shapes
        self._sent_leaves: dict[Any, tuple[Leaf, ...]] = {}
        self._received_leaves: dict[Any, tuple[Leaf, ...]] = {}
        self._handlers: dict[Kind, Callable[[Instruction], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECV_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECV_BACKWARD: self._receive_backward,
        }
        self.runs: dict[tuple[int, int], StageRun] = {}

    def run(self, step: Step) -> None:
        """Run ``step``; returns when this rank's instructions are done and its sends have left."""
        self._step = step
        self._schedule = step.schedule
        self.runs = {}
        self._inputs: dict[tuple[int, int], Boundary] = {}
        self._output_grads: dict[tuple[int, int], list[Tensor]] = {}
        self._input_grads: dict[tuple[int, int], list[Tensor]] = {}
        self._posted: dict[Instruction, Transfer] = {}
        instructions = step.schedule.instructions[self._stage.stage]
        last_backward = self._last_backward_per_chunk(instructions)
        try:
            for position, instruction in enumerate(instructions):
                if instruction.kind in (Kind.FORWARD, Kind.BACKWARD):
                    self._post_ahead(instructions, position + 1)
                if self.gradients is not None and instruction.kind is Kind.BACKWARD:
                    self.gradients.set_final(last_backward[instruction.chunk] == position)
                self._handlers[instruction.kind](instruction)
            if self._links is not None:
                self._links.finish()
        finally:
            self.runs = {}

    @staticmethod
    def _last_backward_per_chunk(instructions: Sequence[Instruction]) -> dict[int, int]:
        return {i.chunk: position for position, i in enumerate(instructions) if i.kind is Kind.BACKWARD}

    def _post_ahead(self, instructions: Sequence[Instruction], position: int) -> None:
        """Post the receives that stand before the next computation, so that they overlap the present one."""
        if self._links is None or not self._links.posts_ahead or self._variable_shapes:
            return
        while position < len(instructions) and instructions[position].kind not in (Kind.FORWARD, Kind.BACKWARD):
            instruction = instructions[position]
            if instruction.kind is Kind.RECV_FORWARD and self._key(instruction) in self._received_leaves:
                self._posted[instruction] = self._post_forward(instruction)
            if instruction.kind is Kind.RECV_BACKWARD and (instruction.chunk, instruction.micro_batch) in self.runs:
                self._posted[instruction] = self._post_backward(instruction)
            position += 1

    def _virtual_stage(self, instruction: Instruction) -> int:
        return self._schedule.virtual_stage(self._stage.stage, instruction.chunk)

    def _forward(self, instruction: Instruction) -> None:
        place = (instruction.chunk, instruction.micro_batch)
        virtual = self._virtual_stage(instruction)
        received = self._inputs.pop(place, None) or Boundary()
        batch = self._step.micro_batches[instruction.micro_batch]
        training = self._step.training
        run = self._stage.run(virtual, instruction.micro_batch, self._step.call, batch, received, training=training)
        self.runs[place] = run
        if virtual == self._schedule.virtual_stages - 1:
            if not training:
                self._step.outputs[instruction.micro_batch] = run.output
                del self.runs[place]
            return
        self._hand_over(self._inputs, virtual + 1, instruction, self._as_input(run.sent))
        if not training and self._is_local(virtual + 1):
            del self.runs[place]

    def _as_input(self, sent: Boundary) -> Boundary:
        tensors = [tensor.detach() for tensor in sent.tensors]
        if self._step.training:
            tensors = [t.requires_grad_(leaf.requires_grad) for t, leaf in zip(tensors, sent.leaves, strict=True)]
        return Boundary(sent.leaves, tensors)

    def _is_local(self, virtual_stage: int) -> bool:
        return self._schedule.owner(virtual_stage)[0] == self._stage.stage

    def _hand_over(self, table: dict[Any, Any], virtual_stage: int, instruction: Instruction, value: Any) -> None:
        """Put ``value`` where a virtual stage on this very rank will look for it; other ranks get a message instead."""
        rank, chunk = self._schedule.owner(virtual_stage)
        if rank == self._stage.stage:
            table[(chunk, instruction.micro_batch)] = value

    def _backward(self, instruction: Instruction) -> None:
        place = (instruction.chunk, instruction.micro_batch)
        virtual = self._virtual_stage(instruction)
        run = self.runs.pop(place)
        self._stage.cursor.resume(self._stage.partition.bounds[virtual], run)
        if virtual == self._schedule.virtual_stages - 1:
            self._backward_from_loss(run)
            self._step.outputs[run.micro_batch] = map_tensors(run.output, torch.detach)
        else:
            self._backward_from_gradients(run, self._output_grads.pop(place))
        self._stage.cursor.end()
        if virtual == 0:
            return
        leaves = [t for t in run.received.tensors if t.requires_grad]
        grads = [t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves]
        self._input_grads[place] = grads
        if self._is_local(virtual - 1):
            self._hand_over(self._output_grads, virtual - 1, instruction, self._input_grads.pop(place))

    def _backward_from_loss(self, run: StageRun) -> None:
        assert self._step.loss_scales is not None
        loss = loss_of(run.output)
        if loss.requires_grad:
            scale = torch.full_like(loss, self._step.loss_scales[run.micro_batch], requires_grad=False)
            torch.autograd.backward(loss, scale)

    @staticmethod
    def _backward_from_gradients(run: StageRun, grads: list[Tensor]) -> None:
        outputs = [tensor for tensor in run.sent.tensors if tensor.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, grads)

    def _tag(self, instruction: Instruction, chunk: int) -> int:
        forward = instruction.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        return 2 * chunk + (0 if forward else 1)

    def _peer_chunk(self, instruction: Instruction, offset: int) -> int:
        return self._schedule.owner(self._virtual_stage(instruction) + offset)[1]

    def _key(self, instruction: Instruction, offset: int = 0) -> Any:
        signature = shape_signature(self._step.micro_batches[instruction.micro_batch])
        return (self._virtual_stage(instruction) + offset, self._step.training, signature)

    def _send_forward(self, instruction: Instruction) -> None:
        assert self._links is not None and instruction.peer is not None
        place = (instruction.chunk, instruction.micro_batch)
        run = self.runs[place] if self._step.training else self.runs.pop(place)
        tag = self._tag(instruction, self._peer_chunk(instruction, 1))
        leaves = run.sent.leaves
        if not self._step.training:
            leaves = tuple(Leaf(leaf.index, leaf.shape, leaf.dtype, False) for leaf in leaves)
        key = self._key(instruction, 1)
        known = None if self._variable_shapes else self._sent_leaves.get(key)
        if known is None:
            self._links.send_object(instruction.peer, leaves, tag)
            self._sent_leaves[key] = leaves
        elif known != leaves:
            raise RuntimeError(
                f"micro-batches of one shape led to different activations between layers: {_shapes(known)} before, "
                f"{_shapes(leaves)} now. The step cuts or pads by the batch's content; pass "
                "`MegatronStrategy(variable_shapes=True)`."
            )
        self._links.send(instruction.peer, run.sent.tensors, tag)

    def _post_forward(self, instruction: Instruction) -> Transfer:
        assert self._links is not None and instruction.peer is not None
        shapes = [(leaf.shape, leaf.dtype) for leaf in self._received_leaves[self._key(instruction)]]
        return self._links.receive(instruction.peer, shapes, self._tag(instruction, instruction.chunk))

    def _receive_forward(self, instruction: Instruction) -> None:
        assert self._links is not None and instruction.peer is not None
        key = self._key(instruction)
        if self._variable_shapes or key not in self._received_leaves:
            tag = self._tag(instruction, instruction.chunk)
            self._received_leaves[key] = self._links.receive_object(instruction.peer, tag)
        transfer = self._posted.pop(instruction, None) or self._post_forward(instruction)
        boundary = Boundary(self._received_leaves[key], transfer.wait())
        for tensor, leaf in zip(boundary.tensors, boundary.leaves, strict=True):
            tensor.requires_grad_(leaf.requires_grad)
        self._inputs[(instruction.chunk, instruction.micro_batch)] = boundary

    def _send_backward(self, instruction: Instruction) -> None:
        assert self._links is not None and instruction.peer is not None
        grads = self._input_grads.pop((instruction.chunk, instruction.micro_batch))
        self._links.send(instruction.peer, grads, self._tag(instruction, self._peer_chunk(instruction, -1)))

    def _post_backward(self, instruction: Instruction) -> Transfer:
        assert self._links is not None and instruction.peer is not None
        run = self.runs[(instruction.chunk, instruction.micro_batch)]
        shapes = [(leaf.shape, leaf.dtype) for leaf in run.sent.leaves if leaf.requires_grad]
        return self._links.receive(instruction.peer, shapes, self._tag(instruction, instruction.chunk))

    def _receive_backward(self, instruction: Instruction) -> None:
        transfer = self._posted.pop(instruction, None) or self._post_backward(instruction)
        self._output_grads[(instruction.chunk, instruction.micro_batch)] = transfer.wait()


def loss_of(output: Any) -> Tensor:
    """The loss in what ``training_step`` returned: the tensor itself, or the entry ``"loss"`` of a mapping.

    Raises:
        RuntimeError: there is none.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise RuntimeError(
            f"`training_step` must return the loss as a tensor, or a dict with it under 'loss', for every "
            f"micro-batch; it "
            f"returned {type(output).__name__}. A step cannot be skipped in distributed training."
        )
    return loss


def _shapes(leaves: Sequence[Leaf]) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in leaves]
