"""Runs a mixture's computation that does not need the experts while tokens are on their way to them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Beside:
    """A computation that needs nothing of the experts, such as a shared expert's; runs once.

    Experts that are shared out over ranks ask for it when their tokens have been sent; where they are not, whoever asks
    for the result does.

    Args:
        call: computes it.
    """

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self._call = call
        self._found: Tensor | None = None

    def result(self) -> Tensor:
        """The result, computed on the first call."""
        if self._found is None:
            self._found = self._call()
        return self._found
