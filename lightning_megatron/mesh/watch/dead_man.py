"""A process whose store does not answer ends by itself: a clock that needs nobody else.

A link that goes silent raises nothing: no connection is closed, and a question to the store waits for ever. Whatever
lives by asking the store is stuck then, the search for hung ranks too. So every answer of the store winds up a clock,
on a thread that asks nobody, and when it has run down the process ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LIMIT_S = 60.0
"""Seconds without an answer, where no ``hang_timeout`` is given."""
ASKING_S = 8.0
"""Seconds beyond ``hang_timeout``: for those who ask all ranks what they are at, and wait for slow answers."""


class DeadManClock:
    """Calls ``ring`` when it has not been wound up for a while.

    Args:
        limit_s: seconds.
        ring: gets the seconds since the clock was wound up; called once, on a thread of its own.
    """

    def __init__(self, limit_s: float, ring: Callable[[float], None]) -> None:
        self._limit_s = limit_s
        self._ring = ring
        self._wound = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_megatron dead-man clock", daemon=True)

    def start(self) -> None:
        """Let it run."""
        self.wind()
        self._thread.start()

    def wind(self) -> None:
        """The store has answered."""
        self._wound = time.monotonic()

    def stop(self) -> None:
        """Never ring."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(min(1.0, self._limit_s / 4)):
            silent = time.monotonic() - self._wound
            if silent >= self._limit_s:
                self._ring(silent)
                return
