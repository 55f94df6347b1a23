"""Which tenth of the exhaustive tables a test belongs to, so that ten runs see every row once."""

from __future__ import annotations

import hashlib
import re

TENTHS = 10
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object in a row, another one in each session


def tenth_of(nodeid: str) -> int:
    """0..9, by a hash of the test's name alone: the same on every machine, whichever other tests there are."""
    return int.from_bytes(hashlib.sha256(_ADDRESS.sub("", nodeid).encode()).digest()[:8], "big") % TENTHS
