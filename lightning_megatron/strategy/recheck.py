"""In which steps something is looked at again that costs too much to be looked at in each: 8, 64, 512, ..."""

from __future__ import annotations


def is_due(count: int, *, first: int = 0) -> bool:
    """Whether ``count`` is a power of 8 above 1, or below ``first``."""
    return count < first or (count > 1 and count.bit_count() == 1 and count.bit_length() % 3 == 1)
