"""``activation_offload``: which layers keep their activations in host memory, and of how many of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ActivationOffload = str | Mapping[str, Any] | Sequence[str] | None
_CHOICES = (
    "None, 'all', {'tokens': share}, {'every': n}, or a list of patterns of layers such as ['*.layers.0']; "
    "{'tokens': share} may have 'layers': patterns beside it"
)


@dataclass(frozen=True)
class HostRequest:
    """What is kept in host memory.

    Attributes:
        patterns: of the names of layers; ``None``: all of them.
        every: each layer of so many.
        tokens: share of the tokens whose activations are kept; the others' are computed again.
    """

    patterns: tuple[str, ...] | None = None
    every: int = 1
    tokens: float = 1.0


def host_request(value: ActivationOffload) -> HostRequest | None:
    """What ``activation_offload`` asks for.

    Raises:
        ValueError: lists the choices.
    """
    if value is None:
        return None
    if value == "auto":
        raise ValueError(
            "`activation_offload='auto'` is not there: nothing measures yet how many tokens fit. Use 'all', or "
            "{'tokens': share} with the largest share for which host memory has room."
        )
    if value == "all":
        return HostRequest()
    if isinstance(value, Mapping):
        return _from_mapping(dict(value))
    if _are_names(value):
        return HostRequest(tuple(value))
    raise ValueError(f"`activation_offload={value!r}` must be {_CHOICES}.")


def _from_mapping(value: dict[str, Any]) -> HostRequest:
    every, share, layers = value.get("every", 1), value.get("tokens", 1.0), value.get("layers")
    known = set(value) in ({"every"}, {"tokens"}, {"layers"}, {"tokens", "layers"})
    counts = type(every) is int and every >= 1
    named = layers is None or _are_names(layers)
    if not known or not counts or not named or isinstance(share, bool) or not isinstance(share, int | float):
        raise ValueError(f"`activation_offload={value!r}` must be {_CHOICES}.")
    if not 0 <= share <= 1:
        raise ValueError(f"`activation_offload={value!r}`: a share of the tokens is from 0 to 1.")
    return HostRequest(None if layers is None else tuple(layers), every, float(share))


def _are_names(value: Any) -> bool:
    plain = isinstance(value, Sequence) and not isinstance(value, str)
    return plain and len(value) > 0 and all(isinstance(entry, str) for entry in value)
