"""A picture of a timeline as PNG, for places that show no SVG; nothing but the standard library is needed.

Bars are filled rectangles, and labels are written in letters of 3 by 5 dots, which is enough for ``F12.1``.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

from lightning_megatron.pipeline.pictures.drawing import colours_of
from lightning_megatron.pipeline.schedules.text import label

if TYPE_CHECKING:
    from lightning_megatron.pipeline.schedules.simulation import Timeline

_DOT = 2  # pixels per dot of a letter
_LEFT, _TOP, _ROW = 40, 8, 22
_WIDEST = 6000  # pixels
_WHITE, _IDLE, _INK = b"\xff\xff\xff", b"\xee\xee\xee", b"\x28\x28\x28"

# Rows from the top, each a number whose three bits are its dots.
_LETTERS = {
    **{"0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717", "6": "74757", "7": "71111"},
    **{"8": "75757", "9": "75717", "F": "74644", "B": "65656", "I": "72227", "W": "55575", ".": "00002"},
}


def png(timeline: Timeline) -> bytes:
    """Draw a timeline as a PNG picture: a row per stage, with its number, and a bar per instruction.

    Args:
        timeline: What happened when.

    Returns:
        The file's bytes.
    """
    schedule = timeline.schedule
    shortest = min(
        (end - start for starts, ends in _rows(timeline) for start, end in zip(starts, ends, strict=True)), default=1.0
    )
    longest = max(timeline.makespan, 1e-12)
    letters = max(len(label(schedule, step)) for steps in schedule.instructions for step in steps)
    scale = min((4.0 * _DOT * letters + 6) / max(shortest, longest / _WIDEST), (_WIDEST - _LEFT - 8) / longest)
    canvas = _Canvas(_LEFT + round(longest * scale) + 8, 2 * _TOP + _ROW * schedule.stages)
    for rank, (starts, ends) in enumerate(_rows(timeline)):
        top = _TOP + _ROW * rank
        canvas.write(str(rank), _LEFT - 6 - 4 * _DOT * len(str(rank)), top + 6, _INK)
        canvas.fill(_LEFT, top + 1, _LEFT + round(longest * scale), top + _ROW - 1, _IDLE)
        for step, start, end in zip(schedule.instructions[rank], starts, ends, strict=True):
            left, right = (_LEFT + round((time - timeline.start) * scale) for time in (start, end))
            colour, ink = (bytes.fromhex(value[1:]) for value in colours_of(step))
            canvas.fill(left, top + 1, max(left + 1, right - 1), top + _ROW - 1, colour)
            name = label(schedule, step)
            wide = 4 * _DOT * len(name) - _DOT
            if wide + 2 <= right - left:
                canvas.write(name, left + (right - left - wide) // 2, top + 6, ink)
    return canvas.encoded()


def _rows(timeline: Timeline) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    return list(zip(timeline.starts, timeline.ends, strict=True))


class _Canvas:
    """Pixels of three bytes."""

    def __init__(self, width: int, height: int) -> None:
        self._width = width
        self._lines = [bytearray(_WHITE * width) for _ in range(height)]

    def fill(self, left: int, top: int, right: int, bottom: int, colour: bytes) -> None:
        """Fill from ``(left, top)`` up to, and without, ``(right, bottom)``."""
        right = min(right, self._width)
        for line in self._lines[top:bottom]:
            line[3 * left : 3 * right] = colour * (right - left)

    def write(self, text: str, left: int, top: int, colour: bytes) -> None:
        """Write letters of ``_LETTERS``; others stay blank."""
        for place, letter in enumerate(text):
            for row, dots in enumerate(_LETTERS.get(letter, "00000")):
                for column in range(3):
                    if int(dots) >> (2 - column) & 1:
                        x, y = left + (4 * place + column) * _DOT, top + row * _DOT
                        self.fill(x, y, x + _DOT, y + _DOT, colour)

    def encoded(self) -> bytes:
        """The canvas as a PNG file (ISO 15948): 8 bits per channel, lines unfiltered."""
        header = struct.pack(">IIBBBBB", self._width, len(self._lines), 8, 2, 0, 0, 0)
        data = zlib.compress(b"".join(b"\0" + bytes(line) for line in self._lines))
        chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
