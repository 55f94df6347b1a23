"""Arguments that are true, false, or a dict that says more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def option_dict(argument: str, value: Any, keys: Sequence[str]) -> Mapping[str, Any] | None:
    """The settings in ``value``: none for ``True``; ``None`` for ``False``.

    Args:
        argument: of the strategy, for messages.
        value: given for it.
        keys: that a dict may have.

    Raises:
        ValueError: it is nothing of the kind, or has other keys.
    """
    if isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, Mapping):
        raise ValueError(f"`{argument}={value!r}` must be True, False or a dict with {quoted(keys)}.")
    if unknown := sorted(set(map(str, value)) - set(keys)):
        raise ValueError(f"`{argument}` has {quoted(unknown)}; it knows {quoted(keys)}.")
    return value


def quoted(names: Iterable[str]) -> str:
    """The ``names`` as a message lists them."""
    return ", ".join(map(repr, names))
