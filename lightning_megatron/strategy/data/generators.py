"""Random generators that samplers and data sets keep to themselves, found by looking at their attributes.

The order of ``DataLoader(data, shuffle=True, generator=torch.Generator())`` comes from that generator and not from the
global ones; an augmentation may draw from ``self.rng = numpy.random.default_rng(0)``. To go on where a run stopped,
both must be where they were.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_DEPTH = 5
_MOST_OBJECTS = 2000
_MOST_ITEMS = 32


def generators_in(holders: Mapping[str, Any]) -> dict[str, Any]:
    """Generators of torch, Python and NumPy that ``holders`` keep in attributes, lists or dicts, by dotted path."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    level = list(holders.items())
    for _ in range(_DEPTH):
        further: list[tuple[str, Any]] = []
        for path, value in level:
            if id(value) in seen or len(seen) >= _MOST_OBJECTS:
                continue
            seen.add(id(value))
            if _is_generator(value):
                found[path] = value
            else:
                further += [(f"{path}.{name}", child) for name, child in _children(value)]
        level = further
    return found


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Their states as plain data."""
    return {path: _plain(_state(generator)) for path, generator in generators.items()}


def restore_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Inverse of :func:`states_of`, for those that are there."""
    for path, generator in generators.items():
        if path in states:
            _restore(generator, states[path])


def _numpy() -> Any:
    return sys.modules.get("numpy")


def _is_generator(value: Any) -> bool:
    numpy = _numpy()
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Tensor, str, bytes, int, float, type(None), type)):
        return
    if isinstance(value, Mapping):
        items: Any = ((str(key), child) for key, child in value.items()) if len(value) <= _MOST_ITEMS else ()
    elif isinstance(value, Sequence):
        # What has its own way of counting items may load one for each.
        plain = type(value) in (list, tuple) and len(value) <= _MOST_ITEMS
        items = ((str(index), child) for index, child in enumerate(value)) if plain else ()
    else:
        items = getattr(value, "__dict__", {}).items()
    yield from items


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def _plain(state: Any) -> Any:
    """``state`` with NumPy's arrays and numbers as lists and Python's."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(_plain(value) for value in state) if any(hasattr(value, "tolist") for value in state) else state
    return state.tolist() if hasattr(state, "tolist") else state


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(list(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = _arrays(state)
    else:
        generator.set_state(state)


def _arrays(state: Any) -> Any:
    """NumPy wants words of a state as arrays."""
    if isinstance(state, dict):
        return {key: _arrays(value) for key, value in state.items()}
    return _numpy().array(state, dtype="uint32") if isinstance(state, list) else state
