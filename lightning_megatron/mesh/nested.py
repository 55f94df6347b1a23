"""Contexts that code further inside can ask for, however deep they are nested."""

from __future__ import annotations


class Nested:
    """A context; true while code runs inside of it. Reentrant, and the same for all threads."""

    def __init__(self) -> None:
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def __bool__(self) -> bool:
        return self._depth > 0


on_filler = Nested()
"""Context in which code runs on rows that stand for none, and are of no sample, so that it has gradients."""
