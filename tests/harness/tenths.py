"""Which rows of a table run every time, and which tenth the others belong to, so that ten runs see every row once."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence

import pytest

TENTHS = 10
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object in a row, another one in each session


def tenth_of(nodeid: str) -> int:
    """0..9, by a hash of the test's name alone: the same on every machine, whichever other tests there are."""
    return int.from_bytes(hashlib.sha256(_ADDRESS.sub("", nodeid).encode()).digest()[:8], "big") % TENTHS


def name_of(item: pytest.Item) -> str:
    """What a test's tenth goes by: its name, or what ``wide(together=function)`` says of its arguments.

    Rows that share a run in one process, which each tenth would have to make, stay together by it.
    """
    marker = item.get_closest_marker("wide")
    together = marker.kwargs.get("together") if marker is not None else None
    return str(together(**item.callspec.params)) if together is not None else item.nodeid  # type: ignore[attr-defined]


def leave_for_tenths(items: Sequence[pytest.Item]) -> None:
    """Of a test marked ``everyday(N)``, leaves N rows as they are, spread evenly, and marks the others ``wide``."""
    tables: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("everyday") and not item.get_closest_marker("wide"):
            tables[item.nodeid.partition("[")[0]].append(item)
    for rows in tables.values():
        (count,) = rows[0].get_closest_marker("everyday").args  # type: ignore[union-attr]
        kept = {at * len(rows) // count for at in range(count)}
        for at, row in enumerate(rows):
            if at not in kept:
                row.add_marker(pytest.mark.wide)
