"""Where another thread is, read without touching its frames.

A thread that looks at another one's frames (``sys._current_frames``, ``f_back``) makes frame objects. Making one may
run a garbage collection, whose finalizers let the other thread go on and leave the very frame: what was made then
points to freed memory, and the process dies of a segmentation fault. ``faulthandler`` writes the lines of a stack
without making any object, and no other thread runs Python code meanwhile::

    Thread 0x00007f0c2b7e5740 (most recent call first):     the threads, as hexadecimal `ident`
      File "/home/me/task.py", line 31 in tokenize          their places, innermost first
"""

from __future__ import annotations

import faulthandler
import linecache
import re
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)\b")
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_PLACE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


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
        The places; ``None`` if the thread is not found (it has ended, or 100 newer threads hide it).
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return read_places(file.read().decode("ascii", "replace"), thread, most)


def read_places(written: str, thread: int, most: int) -> list[StackLine] | None:
    """The places of one thread in what ``faulthandler`` has written about all."""
    found: list[StackLine] | None = None
    for line in written.splitlines():
        header = _THREAD.match(line)
        if header is not None and found is not None:
            break
        if header is not None and int(header[1], 16) == thread:
            found = []
        place = _PLACE.match(line)
        if place is not None and found is not None and len(found) < most:
            number = int(place[2]) if place[2].isdigit() else 0
            found.append(StackLine(_unescaped(place[1]), number, _unescaped(place[3])))
    return found


def _unescaped(name: str) -> str:
    """A name as it was, where ``faulthandler`` wrote ``\\xe9`` for a letter that is not ASCII."""
    if "\\" not in name:
        return name
    return re.sub(
        r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))", lambda m: chr(int(m[m.lastindex or 1], 16)), name
    )


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
