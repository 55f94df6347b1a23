"""A batch whose loss is made of the whole batch: its layers run in micro-batches, the code around them once.

The code before the layers runs on the batch, where the first layer is; what that is called with is cut. The code after
them runs on the batch, where the last layer is, on what the last layer has given, joined. There autograd's graph is cut
too, and what comes back through each cut is kept until all of it is there::

    first stage   batch ─▶ before ─▶ x ══cut══▶ x0 ─▶ layers ─▶ ...        gradients of x0 x1 x2, joined ─▶ before
                                                x1 ─▶ layers ─▶ ...
    last stage                          ... ─▶ layers ─▶ y0 ══join══▶ y ─▶ behind ─▶ loss
                                        ... ─▶ layers ─▶ y1               gradient of y, cut ─▶ layers ─▶ ...

The loss may be any function of the batch, therefore, and layers still follow each other through the pipeline: all
forwards, then all backwards. This is exact where each layer computes sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_megatron.mesh.batches import batch_size_of
from lightning_megatron.pipeline.elsewhere.effects import lasts
from lightning_megatron.pipeline.stage.boundary import Boundary, Leaf, Span, StageRun
from lightning_megatron.pipeline.stage.trunk_output import JoinedBoundary, refuse_left_behind

Call = Callable[[Any, int], Any]


@dataclass
class WholeBatch:
    """The code of a step that runs once on the whole batch.

    Attributes:
        batch: all of it.
        before: the user's step, for the code before the layers.
        behind: the user's step, for the code after them.
        failed: in a trial: why the layers cannot run in micro-batches, as far as this rank has seen.
        given: in a trial: what the last layer gave, joined.
    """

    batch: Any
    before: Call
    behind: Call
    failed: str = ""
    given: Sequence[Tensor] = ()


class RunsAround(Protocol):
    """A stage that can run the layers, the code before them and the code after them separately.

    Attributes:
        device: where it computes.
    """

    device: torch.device

    def run(
        self,
        virtual_stage: int,
        micro_batch: int,
        step: Call,
        batch: Any,
        received: Boundary,
        where: str,
        *,
        trunk_only: bool = False,
    ) -> StageRun:
        """Forward of one micro-batch; see :class:`~lightning_megatron.pipeline.run.pipeline_step.RunsStep`."""

    def run_before(self, step: Call, batch: Any, where: str) -> StageRun:
        """Run the step on a whole batch up to the first layer."""

    def run_behind(self, step: Call, batch: Any, received: JoinedBoundary, where: str) -> StageRun:
        """Run the step on a whole batch from the last layer's output on."""


class Around:
    """The code before and after the layers, in one step.

    Args:
        stage: runs it.
        whole: the batch.
        parts: its micro-batches.
        name: of the user's step.
        training: whether backwards follow.
    """

    def __init__(
        self, stage: RunsAround, whole: WholeBatch, parts: Sequence[Any], name: str, *, training: bool
    ) -> None:
        self._stage, self._whole, self._name, self._training = stage, whole, name, training
        sizes = [batch_size_of(part) for part in parts]
        total = sum(sizes)
        self._spans = [Span(sum(sizes[:at]), sum(sizes[: at + 1]), total) for at in range(len(sizes))]
        self._before = Boundary()
        self._roots: list[Any] = []
        self._taken: dict[int, Boundary] = {}
        self._left: dict[int, Boundary] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}

    def run(
        self,
        place: tuple[int, int],
        call: Call,
        part: Any,
        received: Boundary,
        *,
        ends: bool,
        leaves: Sequence[Leaf] | None,
    ) -> StageRun:
        """Run the user's step on one micro-batch, for its layers.

        Args:
            place: virtual stage and micro-batch.
            call: the user's step, taking a micro-batch and its number.
            part: the micro-batch.
            received: what the stage before sent.
            ends: whether the last layer is on this virtual stage.
            leaves: in a trial: what the next stage is known to get in a step on this micro-batch.
        """
        virtual, micro_batch = place
        try:
            if virtual == 0:
                received = self._arriving(micro_batch)
            run = self._stage.run(virtual, micro_batch, call, part, received, self._name, trunk_only=ends)
            if lasts(run.sent.effects):
                refuse_left_behind()
            return run
        except Exception as error:
            if self._training or not (ends or leaves):
                raise
            return self._fail(error, micro_batch, leaves or ())

    def _arriving(self, micro_batch: int) -> Boundary:
        """Input of the first layer in a micro-batch; the code before the layers runs for the first of them."""
        if not self._before.leaves:
            self._first = self._stage.run_before(self._whole.before, self._whole.batch, self._name)
            sent = self._first.sent
            if lasts(sent.effects):
                refuse_left_behind()
            if self._training:
                self._roots = [get_gradient_edge(tensor) for tensor in sent.tensors if tensor.requires_grad]
            leaves = tuple(
                Leaf(leaf.index, leaf.shape, leaf.dtype, leaf.requires_grad and self._training) for leaf in sent.leaves
            )
            self._before = Boundary(leaves, [tensor.detach() for tensor in sent.tensors])
        return Boundary(self._before.leaves, list(self._before.tensors), span=self._spans[micro_batch])

    def _fail(self, error: Exception, micro_batch: int, leaves: Sequence[Leaf]) -> StageRun:
        """In a trial, go on with zeros where the step cannot be run so, so that the stages that wait go on.

        Args:
            error: what was raised.
            micro_batch: where.
            leaves: what the next stage is to get.
        """
        self._whole.failed = self._whole.failed or f"{type(error).__name__}: {error}"
        zeros = [torch.zeros(leaf.shape, dtype=leaf.dtype, device=self._stage.device) for leaf in leaves]
        return StageRun(micro_batch, Boundary(), Boundary(tuple(leaves), zeros))

    def leave(self, micro_batch: int, run: StageRun) -> None:
        """Keep the output of the last layer for a micro-batch."""
        detached = [tensor.detach() for tensor in run.sent.tensors]
        self._left[micro_batch] = Boundary(run.sent.leaves, detached, forms=run.sent.forms)

    @property
    def is_complete(self) -> bool:
        """Whether the last layer has run in all micro-batches."""
        return len(self._left) == len(self._spans)

    def try_behind(self, outputs: dict[int, Any]) -> None:
        """In a trial, run the code after the layers; its output goes to ``outputs``."""
        try:
            outputs[0] = self.behind(None)
        except Exception as error:
            self._fail(error, 0, ())

    def behind(self, backward: Callable[[StageRun], None] | None) -> Any:
        """Run the code after the layers.

        Args:
            backward: that of the step's output; ``None`` where none follows.

        Returns:
            What the step gave.
        """
        parts = [self._left[at] for at in range(len(self._spans))]
        joined = JoinedBoundary(parts=parts, spans=self._spans, wants=self._training)
        run = self._stage.run_behind(self._whole.behind, self._whole.batch, joined, self._name)
        if backward is not None:
            backward(run)
            self._gradients = dict(enumerate(joined.parts_of_gradients()))
        else:
            self._whole.given = joined.tensors
        self._left = {}
        return run.output

    def gradients(self, micro_batch: int) -> list[Tensor | None]:
        """Gradients of the last layer's output for a micro-batch; ``None`` where the loss does not depend on it."""
        return self._gradients.pop(micro_batch)

    def take(self, micro_batch: int, received: Boundary, differentiate: Callable[..., None]) -> None:
        """Keep the gradients of the first layer's input; the last of them starts the backward of the code before.

        Args:
            micro_batch: its number.
            received: the input.
            differentiate: runs autograd back; see
                :meth:`~lightning_megatron.pipeline.run.pipeline_step.PipelineStep.differentiate`.
        """
        self._taken[micro_batch] = received
        if len(self._taken) == len(self._spans):
            differentiate(self._first, self._roots, self._whole_gradients())

    def _whole_gradients(self) -> list[Tensor | None]:
        parts = [self._taken[at] for at in range(len(self._spans))]
        found = [iter(part.with_gradients()) for part in parts]
        whole: list[Tensor | None] = []
        for place, leaf in enumerate(self._before.leaves):
            if leaf.requires_grad:
                pieces = [next(gradients) for gradients in found]
                dim = parts[0].dims.get(place)
                each = [torch.zeros_like(like) if gradient is None else gradient for like, gradient in pieces]
                joined = torch.stack(each).sum(0) if dim is None else torch.cat(each, dim)
                whole.append(None if all(gradient is None for _, gradient in pieces) else joined)
        return whole
