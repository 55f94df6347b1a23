"""The executor's input, and its interfaces to the two sides that it runs between.

The executor knows neither Lightning nor how a module is cut: the user's step comes as a callable, the module as
:class:`RunsStep`, the gradients as :class:`HearsFinal`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_megatron.pipeline.run.around import WholeBatch
from lightning_megatron.pipeline.run.finality import Final
from lightning_megatron.pipeline.schedules.instructions import Schedule
from lightning_megatron.pipeline.stage.boundary import Boundary, StageRun
from lightning_megatron.pipeline.stage.final_state import TRIAL


class HearsFinal(Protocol):
    """Collector of a step's gradients, as far as the executor knows it."""

    def set_final(self, final: Final) -> None:
        """Declare which of the gradients from now on are the last of this step: all, none, or some by id."""


class RunsStep(Protocol):
    """Runs the user's step on this rank: one stage of a cut module, or the whole module as the only stage."""

    stage: int
    schedule: Schedule | None
    leaves_out: bool  # whether the step that runs may return None before the layers

    def run(
        self,
        virtual_stage: int,
        micro_batch: int,
        step: Callable[[Any, int], Any],
        batch: Any,
        received: Boundary,
        where: str,
        *,
        trunk_only: bool = False,
    ) -> StageRun:
        """Forward of one micro-batch; ends where this virtual stage does."""

    def resume(self, virtual_stage: int, run: StageRun) -> None:
        """Prepare for the backward of ``run``, in which layers may be recomputed."""

    def end(self) -> None:
        """Finish that backward."""

    def may_write(self, virtual_stage: int, where: str) -> bool:
        """Whether layers of a virtual stage may write into its input; true unless they are known not to."""

    def owned_layers(self) -> Iterable[nn.Module]:
        """Layers here, in which a split backward looks for linears."""


@dataclass
class PipelineStep:
    """One step to run through the pipeline.

    Attributes:
        schedule: lowered schedule.
        call: the user's step, taking a micro-batch and its number.
        micro_batches: the batch, cut; the same on every stage.
        name: of the user's step, such as ``"training_step"``.
        loss_scales: factor of each micro-batch's loss in backward; empty in evaluation, where no backward runs.
        gradients: told in which backward gradients become final.
        goes_on: asked, on every stage, between the forwards and the backwards of a step of one micro-batch: whether
            backwards are to run.
        outputs: filled on the stage that computes the loss: the step's return value per micro-batch, detached.
        whole: where only the layers run in micro-batches: what runs once on the whole batch. There is one loss then,
            and one output.
        backwards: contexts in which autograd runs.
    """

    schedule: Schedule
    call: Callable[[Any, int], Any]
    micro_batches: Sequence[Any]
    name: str
    loss_scales: Sequence[float] = ()
    gradients: HearsFinal | None = None
    goes_on: Callable[[], bool] | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    whole: WholeBatch | None = None
    backwards: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def training(self) -> bool:
        """Whether backwards run."""
        return bool(self.loss_scales)

    @property
    def may_be_left_out(self) -> bool:
        """Whether the step may return ``None`` before the layers; stages then tell each other, with each boundary.

        Not where layers run in micro-batches inside of a whole batch, whose boundaries may be empty.
        """
        return self.whole is None and (self.goes_on is not None or self.name == TRIAL)

    def differentiate(self, run: StageRun, roots: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
        """Let autograd run back from tensors, or edges of the graph of a run; collective over those that exchange
        messages in it.

        Args:
            run: the forward.
            roots: the tensors or edges.
            gradients: of each; ``None`` for those behind which there are parameters alone.
        """
        reached = [(root, grad) for root, grad in zip(roots, gradients, strict=True) if grad is not None]
        if run.joint is not None:
            nodes = [root.grad_fn if isinstance(root, Tensor) else root.node for root, _ in reached]
            reached += [(root, torch.zeros_like(root)) for root in run.further_roots(nodes)]
        if reached:
            with self.backwards():
                torch.autograd.backward([root for root, _ in reached], [grad for _, grad in reached])


def loss_of(output: Any) -> Tensor:
    """The loss in what ``training_step`` returned: the tensor itself, or the entry ``"loss"`` of a mapping.

    Raises:
        RuntimeError: there is none.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise RuntimeError(
            "`training_step` must return the loss as a tensor, or a dict with it under 'loss', for every micro-batch; "
            f"it returned {type(output).__name__}. To leave a batch out, say `return None` in the code of "
            "`training_step` itself, with one replica and `whole_batch_loss='auto'`; "
            "`MegatronStrategy(nonfinite='skip')` skips updates whose loss or gradients are not finite."
        )
    if loss.numel() != 1:
        raise RuntimeError(
            f"`training_step` returned a loss of shape {tuple(loss.shape)}; a gradient is that of a scalar, so take "
            "the mean or the sum over it."
        )
    return loss


def trained_loss_of(output: Any) -> Tensor:
    """:func:`loss_of` for a backward.

    Raises:
        RuntimeError: there is no gradient to go back.
    """
    loss = loss_of(output)
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss that `training_step` returned does not require grad: it was detached, or computed from "
            "nothing that is trained."
        )
    return loss
