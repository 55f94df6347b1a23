"""Gradients of a rank that shares no parameter with another: autograd's own, which nothing has to watch."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class LocalGradients:
    """What ``GradientBuckets`` does, where there is nothing to sum.

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
        """Prepare for the backward(s) of one batch: ``fresh`` ones start from nothing, others add to ``.grad``."""
        self._withdrawn = None
        if fresh:
            for parameter in self._parameters:
                parameter.grad = None

    def withdraw(self) -> None:
        """Take the gradients out of sight, so that ``zero_grad`` between the step and its backward cannot wipe them."""
        self._withdrawn = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def set_final(self, final: bool | frozenset[int]) -> None:
        """Nobody waits for the last gradient."""

    def finish(self) -> None:
        """Put the gradients back where they were."""
        withdrawn, self._withdrawn = self._withdrawn, None
        if withdrawn is not None:
            for parameter, grad in zip(self._parameters, withdrawn, strict=True):
                parameter.grad = grad

    def close(self) -> None:
        """Let go of gradients that were withdrawn."""
        self._withdrawn = None
