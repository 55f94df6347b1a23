"""Predicts the window that opens next, so that it can be gathered while the layer before it computes.

Windows open in the order of the step before, whatever the schedule; replicas agree on each opening, so that all of them
know the same order and start the same gathers at the same places. ::

    the step before   0  1  2  head  head  2  1  0
    open 0            start 1 │ open 1, start 2 │ open 2, start head │ ...

A step that goes another way, such as one with fewer micro-batches, is found again in the order where it can be.
"""

from __future__ import annotations

from lightning_megatron.data_parallel.windows.window import Window


class Ahead:
    """The order in which windows open."""

    def __init__(self) -> None:
        self._before: list[Window] = []
        self._now: list[Window] = []
        self._at: int | None = 0

    def begin(self) -> None:
        """A step begins."""
        if self._now:
            self._before = self._now
        self._now, self._at = [], 0

    @property
    def next(self) -> Window | None:
        """The window that opens next, if the step goes on as the one before did."""
        return self._before[self._at] if self._at is not None and self._at < len(self._before) else None

    def opened(self, window: Window) -> None:
        """Note that a window has been opened, or stays open where it would have been opened again."""
        self._now.append(window)
        if self._at is None:
            return
        places = (place for place in range(self._at, len(self._before)) if self._before[place] is window)
        found = next(places, None)
        self._at = None if found is None else found + 1
