"""Notes of routers about each micro-batch of a batch, from which balancing losses of the whole batch are made.

A balancing loss is linear in the mean scores once it is known how often each expert was chosen. So a pass of counts
goes before the step, forward only, and each micro-batch of the step has the loss of the whole batch, with the gradient
for its own tokens, divided by what it counts in the mean over micro-batches::

    pass of counts   F0 F1 F2 F3                what routers have said, of each
    step             F0 F1 B0 F2 B1 F3 B2 B3    A in each of them; ∂A/∂logits of its own tokens / its weight
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

_REFUSED = (
    "a balancing loss of the whole batch was made in a step in micro-batches, and no trial had seen it before: each "
    "micro-batch would have its own. Make it from the first step on, with a tiny factor until it is to count, or use "
    "`MegatronStrategy(whole_batch_loss=True)`, with which batches stay whole."
)


class PartsOfBatch:
    """Inputs of one kind of balancing loss in each micro-batch, and its value for the whole.

    Attributes:
        aside: whether they are left out, as 1 that depends on nothing.
        notes: whether what they are given is noted, and has no gradient.
        alone: whether the part that runs is a batch of its own.
    """

    def __init__(self) -> None:
        self.aside, self.notes, self.alone = False, False, False
        self._part: int | None = None
        self._place = 0
        self._noted: list[list[Any]] = []
        self._whole: list[Any] = []
        self._factors: list[float] = []

    @property
    def running(self) -> bool:
        """Whether losses are those of a part of a batch, or of a trial."""
        return self.aside or self.notes or self.alone or self._part is not None

    @contextmanager
    def noting(self, count: int) -> Iterator[None]:
        """Note what is given in so many micro-batches; what was noted before is forgotten."""
        self.notes, self._noted, self._whole = True, [[] for _ in range(count)], []
        try:
            yield
        finally:
            self.notes = False

    def at(self, part: int | None) -> None:
        """Say that the step runs on a micro-batch from now on, from its start; ``None`` for none."""
        self._part, self._place = part, 0

    def note(self, given: Any) -> None:
        """Keep what a loss was given in the micro-batch that runs; nothing of those that were not announced."""
        if self._part is not None and self._part < len(self._noted):
            noted = self._noted[self._part]
            noted[self._place :] = [given]
            self._place += 1

    def join(self, factors: list[float], join: Callable[[list[Any]], Any]) -> None:
        """Make what was noted of all micro-batches one; losses are those of the whole from now on.

        Args:
            factors: of gradients, of each micro-batch.
            join: makes one of what a loss was given in each micro-batch.
        """
        self._factors = factors
        counts = [len(noted) for noted in self._noted]
        self._whole = [join([noted[place] for noted in self._noted]) for place in range(min(counts, default=0))]
        self._noted = []

    def taken(self) -> tuple[Any, int, float]:
        """The result of ``join`` for the loss that is made now, in which micro-batch, and the factor of its gradient.

        Raises:
            ValueError: nothing was noted of it.
        """
        part, place = self._part, self._place
        if part is None or place >= len(self._whole):
            raise ValueError(_REFUSED)
        self._place += 1
        return self._whole[place], part, self._factors[part]

    def forget(self) -> None:
        """Forget the notes."""
        self._noted, self._whole, self._part = [], [], None


def left_aside(beside: Tensor) -> Tensor:
    """1, with a graph where ``beside`` has one."""
    return beside.sum() * 0 + 1


def with_gradient(value: Tensor, of: Tensor, gradient: Tensor) -> Tensor:
    """``value`` with a gradient for ``of``."""
    return cast(Tensor, _WithGradient.apply(value, of, gradient))


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, of: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return grad, (grad * ctx.saved_tensors[0]), None
