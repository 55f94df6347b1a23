"""The precision that code runs in: torch's default dtype, and autocast.

Lightning sets it around the user's step and runs the backward outside of it. A schedule starts its backwards in the
middle of that step; what hooks and custom autograd functions compute there must not depend on it::

    one process   [ training_step ]  backward      "64-true": torch.tensor(0.1) in a hook is of float32
    a schedule    [ training_step, ]backward[ , training_step, ]backward[ ]
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

Casting = tuple[str, bool, torch.dtype]


@functools.cache
def _kinds() -> tuple[str, ...]:
    """Types of devices that this process may compute on."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def casting_of(kind: str) -> Casting:
    """Autocast's state for a type of device: that type, whether autocast is on, and its dtype."""
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


@contextmanager
def cast_as(casting: Casting) -> Iterator[None]:
    """With autocast in that state."""
    kind, enabled, dtype = casting
    with torch.autocast(kind, dtype=dtype, enabled=enabled):
        yield


@dataclass(frozen=True)
class RunningPrecision:
    """A precision.

    Attributes:
        dtype: of floating-point tensors that are made without naming one.
        castings: autocast's state, by type of device.
    """

    dtype: torch.dtype
    castings: tuple[Casting, ...]

    @staticmethod
    def now() -> RunningPrecision:
        """That in which this thread runs."""
        return RunningPrecision(torch.get_default_dtype(), tuple([casting_of(kind) for kind in _kinds()]))

    @contextmanager
    def entered(self, now: RunningPrecision | None = None) -> Iterator[None]:
        """On this thread, which runs in ``now``; the default dtype is that of all threads."""
        now = now or RunningPrecision.now()
        if now == self:
            yield
            return
        with ExitStack() as stack:
            for casting, present in zip(self.castings, now.castings, strict=True):
                if casting[1] != present[1] or (casting[1] and casting != present):
                    stack.enter_context(cast_as(casting))
            stack.callback(torch.set_default_dtype, now.dtype)
            torch.set_default_dtype(self.dtype)
            yield


class StepPrecision:
    """The precision around the user's training steps, in which their backwards run, and that inside of them."""

    def __init__(self) -> None:
        self._around: RunningPrecision | None = None
        self._inside: RunningPrecision | None = None
        self._steps = _Step(self)

    def step(self) -> AbstractContextManager[None]:
        """Around a step, outside of the context of its precision."""
        return self._steps

    def begin(self) -> None:
        """A step begins."""
        self._around = RunningPrecision.now()

    def end(self) -> None:
        """It has ended."""
        self._around = None

    def backward(self) -> AbstractContextManager[None]:
        """Around a backward in the middle of a step; changes nothing outside of steps."""
        if self._around is None:
            return nullcontext()
        now = RunningPrecision.now()
        return _Backward(self, now, None if now == self._around else self._around.entered(now))

    def swap(self, inside: RunningPrecision | None) -> RunningPrecision | None:
        """Say in which precision the step runs whose backward comes now; gives that of one around it."""
        before, self._inside = self._inside, inside
        return before

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Around what other code does in the middle of such a backward."""
        inside, self._inside = self._inside, None
        try:
            if inside is None:
                yield
            else:
                with inside.entered():
                    yield
        finally:
            self._inside = inside


class _Step(AbstractContextManager[None]):
    """Around the steps of a run."""

    def __init__(self, owner: StepPrecision) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._owner.begin()

    def __exit__(self, *error: Any) -> None:
        self._owner.end()


class _Backward(AbstractContextManager[None]):
    """Around one backward: notes the step's precision, and enters another one only where it differs."""

    def __init__(
        self, owner: StepPrecision, inside: RunningPrecision, other: AbstractContextManager[None] | None
    ) -> None:
        self._owner, self._inside, self._other = owner, inside, other

    def __enter__(self) -> None:
        self._before = self._owner.swap(self._inside)
        if self._other is not None:
            self._other.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            if self._other is not None:
                self._other.__exit__(*error)
        finally:
            self._owner.swap(self._before)
