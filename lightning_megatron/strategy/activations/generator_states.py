"""The generators that layers draw from: of the processor, and of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """State of the generators that a layer draws from."""
    own = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return torch.get_rng_state(), *own


def set_random_state(state: tuple[Tensor, ...], device: torch.device) -> None:
    """Let the generators go on from there."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1], device)


def differs(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Whether something was drawn between two states."""
    return any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def random_as(state: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Random numbers are those after a ``state``, and afterwards as they are now; ``None`` changes nothing."""
    if state is None:
        yield
        return
    now = random_state(device)
    set_random_state(state, device)
    try:
        yield
    finally:
        set_random_state(now, device)
