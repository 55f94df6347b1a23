"""Which tenth of the exhaustive tables a test belongs to, so that ten runs see every row once."""

from __future__ import annotations

import hashlib

TENTHS = 10


def tenth_of(nodeid: str) -> int:
    """0..9, by a hash of the test's name alone: the same on every machine, whichever other tests there are."""
    return int.from_bytes(hashlib.sha256(nodeid.encode()).digest()[:8], "big") % TENTHS
