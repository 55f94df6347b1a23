"""The generators that one process draws from, for steps whose code runs on every stage in one order.

Such a step needs no streams of its own: where one stage alone runs a layer, it tells the others how far it has drawn,
and all go on from there. Tokens that the step samples, and its dropout masks, are then those of one process.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class OneStream:
    """In the place of :class:`.random_streams.SegmentStreams`: nothing is reseeded.

    Args:
        device: device whose generator is used besides the CPU's.

    Attributes:
        segmented: whether segments of a step draw from streams of their own.
    """

    segmented = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self, micro_batch: int, segment: int, call: int = 0) -> None:
        """There is one segment."""

    def enter_micro_batch(self, micro_batch: int) -> None:
        """Micro-batches draw one after the other."""

    def position(self) -> tuple[Any, ...]:
        """States of torch's, Python's and NumPy's generators."""
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        return torch.get_rng_state(), cuda, random.getstate(), numpy

    def drawn_since(self, position: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The present position, if anything was drawn since another one; else ``None``."""
        now = self.position()
        torch_alike = all(old is new or torch.equal(old, new) for old, new in zip(position[:2], now[:2], strict=True))
        return None if torch_alike and position[2] == now[2] and _place(position[3]) == _place(now[3]) else now

    def go_to(self, position: tuple[Any, ...]) -> None:
        """Restore the states that :meth:`position` returned."""
        torch.set_rng_state(position[0])
        if position[1] is not None:
            torch.cuda.set_rng_state(position[1], self._device)
        random.setstate(position[2])
        if position[3] is not None:
            sys.modules["numpy"].random.set_state(position[3])


def _place(numpy: Any) -> Any:
    """Key that changes when NumPy's generator has drawn."""
    return None if numpy is None else (int(numpy[1][0]), *numpy[2:])
