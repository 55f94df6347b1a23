"""Gradients of a rank that shares no parameter with another: autograd's own, without buckets or reductions."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class LocalGradients:
    """Takes the place of ``GradientBuckets`` where gradients need no reduction.

    Args:
        parameters: all parameters on this rank, trained or not.
    """

    scatters = False

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._withdrawn: list[Tensor | None] | None = None

    def begin(
        self, *, fresh: bool | None, reduce: bool, divide_by: int = 1, scale: float = 1.0, once: bool = False
    ) -> None:
        """Prepare for the backward(s) of one batch: clear ``.grad`` if ``fresh``, else accumulate into it."""
        self._withdrawn = None
        if fresh:
            for parameter in self._parameters:
                parameter.grad = None

    def withdraw(self) -> None:
        """Set ``.grad`` aside, so that ``zero_grad`` between the step and its backward cannot clear it."""
        self._withdrawn = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def set_final(self, final: bool | frozenset[int]) -> None:
        """Do nothing: no reduction waits for the last gradient."""

    def all_arrived(self) -> None:
        """Do nothing: nothing is reduced."""

    def finish(self) -> None:
        """Put gradients that were set aside back into ``.grad``."""
        withdrawn, self._withdrawn = self._withdrawn, None
        if withdrawn is not None:
            for parameter, grad in zip(self._parameters, withdrawn, strict=True):
                parameter.grad = grad

    def close(self) -> None:
        """Free gradients that were set aside."""
        self._withdrawn = None
