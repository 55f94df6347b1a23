"""Random generators and iterators, put back to an earlier position.

The state of a generator is copied. Iterators have no state that could be, so they are wrapped, and give again what
they have given::

    self.rng = random.Random(0)      self.more = itertools.cycle(rows)      self.others = iter(loader)
"""

from __future__ import annotations

import functools
import operator
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_megatron.mesh.parts.packages import comes_from


@dataclass(frozen=True)
class State:
    """The state of a random generator, or the position of an iterator."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and _is_equal(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]


class Replayed:
    """An iterator that can go back to earlier positions, except to those it was told to forget.

    Args:
        iterator: any; nothing else may take values from it from now on.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator, self._kept, self._first, self._at = iterator, deque[Any](), 0, 0

    def __iter__(self) -> Replayed:
        return self

    def __next__(self) -> Any:
        if self._at - self._first == len(self._kept):
            self._kept.append(next(self._iterator))
        self._at += 1
        return self._kept[self._at - 1 - self._first]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_iterator" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def forget(self) -> None:
        """Forget the values before the current position."""
        for _ in range(self._at - self._first):
            self._kept.popleft()
        self._first = self._at

    def go_back(self, place: int) -> None:
        """Go to a position, also to one ahead that has not been reached yet."""
        self._at = min(place, self._first + len(self._kept))
        while self._at < place:
            next(self)


def replayed(value: Any) -> Any:
    """A :class:`Replayed` for an iterator whose state cannot be read; any other value unchanged."""
    hidden = isinstance(value, Iterator) and comes_from(type(value), "builtins", "itertools")
    return Replayed(value) if hidden or isinstance(value, _BaseDataLoaderIter) else value


def state_of(value: Any) -> State | None:
    """The state of a generator or iterator; ``None`` for anything else."""
    kind: type = type(value)
    read = _reader(kind)
    return None if read is None else State(read(value))


@functools.lru_cache(maxsize=1024)
def _reader(kind: type) -> Callable[[Any], Any] | None:
    """Reader of the state of values of a class; most classes have none."""
    if issubclass(kind, Replayed):
        return operator.attrgetter("_at")
    if issubclass(kind, random.Random):
        return kind.getstate if kind is random.Random else None
    if issubclass(kind, torch.Generator):
        return operator.methodcaller("get_state")
    if comes_from(kind, "numpy.random"):
        if kind.__name__ == "Generator":
            return operator.attrgetter("bit_generator.state")
        if kind.__name__ == "RandomState":
            return operator.methodcaller("get_state", legacy=False)
    return None


def set_state(value: Any, state: State) -> None:
    """Put a generator or iterator back to an earlier state."""
    if isinstance(value, Replayed):
        value.go_back(state.value)
    elif isinstance(value, random.Random):
        value.setstate(state.value)
    elif type(value).__name__ == "Generator" and not isinstance(value, torch.Generator):
        value.bit_generator.state = state.value
    else:
        value.set_state(state.value)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(entry, other[key]) for key, entry in one.items())
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)
