"""Which tenth of the exhaustive tables a test belongs to, so that ten runs see every row once."""

from __future__ import annotations

import hashlib
import re

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
