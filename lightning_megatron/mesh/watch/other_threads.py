"""Reads from outside where another thread is, without ending the process.

To look at another thread's frames (``sys._current_frames``, ``f_back``) makes frame objects. Before Python 3.12, making
one may collect garbage at once, whose finalizers let the other thread go on and leave the very frame: what was made
then points to freed memory, a segmentation fault. So no garbage is collected while a frame object is made::

    this thread     make an object of frame f ─ collect ─ __del__ releases the GIL ─▶ f is gone, its object is not
    the other one                                         └─▶ leaves f

``faulthandler`` makes no objects, but walks the list of threads without its lock: a thread that torch starts meanwhile,
for a collective or a backward, is on that list before it has a stack.
"""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple


class StackLine(NamedTuple):
    """One line of a stack.

    Attributes:
        file: path of the code.
        line: its number there, from 1; 0 where it is not known.
        name: of the function.
    """

    file: str
    line: int
    name: str

    def text(self) -> str:
        """The line's code; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


def places_of(thread: int, most: int = 40) -> list[StackLine] | None:
    """Places of a thread, innermost first.

    Args:
        thread: its ``ident``.
        most: how many are read.

    Returns:
        The places; ``None`` if the thread is not found.
    """
    with _nothing_collected():
        frame: FrameType | None = sys._current_frames().get(thread)
        if frame is None:
            return None
        found: list[StackLine] = []
        while frame is not None and len(found) < most:
            found.append(StackLine(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
            frame = frame.f_back
        return found


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """No garbage is collected inside, for far less than the 5 ms after which another thread gets its turn."""
    with _ONE:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


_ONE = threading.Lock()


def listing(places: Sequence[StackLine]) -> str:
    """Lines as a traceback shows them, outermost first.

    Args:
        places: innermost first.
    """
    lines = []
    for place in reversed(places):
        lines.append(f'  File "{place.file}", line {place.line}, in {place.name}\n')
        if text := place.text():
            lines.append(f"    {text}\n")
    return "".join(lines)
