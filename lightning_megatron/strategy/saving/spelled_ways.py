"""Dictionaries in which the ways to values spell names of weights, as flat ones.

What is kept of each weight may be kept by module, or under a name and something else::

    {"head": {"weight": a, "bias": b}}   ──▶   {"head.weight": (("head", "weight"), a), "head.bias": ...}
    {("head.weight", 0): a}              ──▶   {"head.weight": ((("head.weight", 0),), a)}
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

Way = tuple[Any, ...]
WAYS_TO_SPELL = 2
_DEEPEST = 4


def spelled(table: Mapping[Any, Any], variant: int) -> dict[str, tuple[Way, Any]]:
    """A flat dictionary by what ways spell; nothing of a flat one, and of one with other keys than words and numbers.

    Args:
        table: a dictionary, with others in it or with tuples for keys.
        variant: 0 where all keys of a way spell it, 1 where words do.
    """
    if not any(isinstance(key, tuple) or isinstance(value, dict) for key, value in table.items()):
        return {}
    ways = [(way, list(_parts(way)), value) for way, value in _ways(table, ())]
    if not all(isinstance(part, (str, int)) for _, parts, _ in ways for part in parts):
        return {}
    found = {".".join(str(p) for p in parts if not variant or isinstance(p, str)): (way, v) for way, parts, v in ways}
    return found if len(found) == len(ways) else {}


def unfolded(entries: Mapping[str, tuple[Way, Any]], like: Mapping[Any, Any]) -> dict[Any, Any]:
    """The dictionary that :func:`spelled` was made of, from its entries, in their order.

    Args:
        entries: ways and values.
        like: a dictionary of the same class, and with others of theirs.
    """
    made = _empty(like)
    for way, value in entries.values():
        inner, source = made, like
        for key in way[:-1]:
            source = source.get(key, {}) if isinstance(source, dict) else {}
            inner = inner.setdefault(key, _empty(source))
        inner[way[-1]] = value
    return made


def _empty(like: Mapping[Any, Any]) -> dict[Any, Any]:
    made: dict[Any, Any] = copy.copy(like) if isinstance(like, dict) else {}
    made.clear()
    return made


def _ways(table: Mapping[Any, Any], way: Way) -> Iterator[tuple[Way, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and value and len(way) < _DEEPEST:
            yield from _ways(value, (*way, key))
        else:
            yield (*way, key), value


def _parts(way: Way) -> Iterator[Any]:
    for key in way:
        yield from key if isinstance(key, tuple) else (key,)
