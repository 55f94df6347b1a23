"""``activation_offload``: which layers keep their activations in host memory, and of how many of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ActivationOffload = str | Mapping[str, Any] | Sequence[str] | None
_CHOICES = (
    "None, 'all', 'auto', {'tokens': share}, {'every': n}, or a list of patterns of layers such as ['*.layers.0']; "
    "{'tokens': share or 'auto'} may have 'layers': patterns beside it"
)


@dataclass(frozen=True)
class HostRequest:
    """The activations that are to be kept in host memory.

    Attributes:
        patterns: of the names of layers; ``None``: all of them.
        every: each layer of so many.
        tokens: share of the tokens whose activations are kept; the others' are computed again. ``None``: the largest
            that fits.
    """

    patterns: tuple[str, ...] | None = None
    every: int = 1
    tokens: float | None = 1.0

    @property
    def splits(self) -> bool:
        """Whether layers may run again on some of their tokens."""
        return self.tokens != 1.0

    @property
    def words(self) -> str:
        """The request, as an option's value."""
        share: Any = "auto" if self.tokens is None else self.tokens
        if self.every > 1:
            return str({"every": self.every})
        if self.patterns is None:
            return repr(share if share == "auto" else "all") if share in ("auto", 1.0) else str({"tokens": share})
        given = {"tokens": share} if share != 1.0 else {}
        return str({**given, "layers": list(self.patterns)})


def host_request(value: ActivationOffload) -> HostRequest | None:
    """The request made by ``activation_offload``.

    Raises:
        ValueError: lists the choices.
    """
    if value is None:
        return None
    if value == "auto":
        return HostRequest(tokens=None)
    if value == "all":
        return HostRequest()
    if isinstance(value, Mapping):
        return _from_mapping(dict(value))
    if _are_names(value):
        return HostRequest(tuple(value))
    raise ValueError(f"`activation_offload={value!r}` must be {_CHOICES}.")


def _from_mapping(value: dict[str, Any]) -> HostRequest:
    every, share, layers = value.get("every", 1), value.get("tokens", 1.0), value.get("layers")
    chosen = share == "auto"
    share = 0.0 if chosen else share
    known = set(value) in ({"every"}, {"tokens"}, {"layers"}, {"tokens", "layers"})
    counts = type(every) is int and every >= 1
    named = layers is None or _are_names(layers)
    if not known or not counts or not named or isinstance(share, bool) or not isinstance(share, int | float):
        raise ValueError(f"`activation_offload={value!r}` must be {_CHOICES}.")
    if not 0 <= share <= 1:
        raise ValueError(f"`activation_offload={value!r}`: a share of the tokens is from 0 to 1.")
    return HostRequest(None if layers is None else tuple(layers), every, None if chosen else float(share))


def _are_names(value: Any) -> bool:
    plain = isinstance(value, Sequence) and not isinstance(value, str)
    return plain and len(value) > 0 and all(isinstance(entry, str) for entry in value)
