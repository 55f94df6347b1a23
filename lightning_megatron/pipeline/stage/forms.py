"""Forms of calls' results, without the numbers: sent by the stage that computes a layer to those that skip it.

A stage that skips a layer goes on with zeros of the shape that it would have returned. Nobody knows that shape better
than the stage that ran it a moment ago: a layer may choose it by its data, or by an attribute that a hook has changed::

    stage 0   layer 1: x [2, 16, 8] ──▶ (x [2, 11, 8], 0.3)     ──form──▶
    stage 1   layer 1 is skipped                                  zeros [2, 11, 8], and 0.3

A form is made of tuples, numbers and names only, so that forms can be compared and sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

_SCALARS = (bool, int, float, complex, str, type(None))
_NESTS = (tuple, list, dict)
_DEEPEST = 4


class _Nest(NamedTuple):
    """A list, a tuple or a dictionary."""

    kind: type
    keys: tuple[Any, ...]
    entries: tuple[Any, ...]


class _Plain(NamedTuple):
    """A number, a string, or nothing."""

    value: Any


Form = tuple[Any, ...]


@dataclass
class Forms:
    """Forms of the results of layers, and of the parts before them, in one run of a step.

    Attributes:
        layers: forms by the layer's number; of the n-th call inside of a container, by (number, n).
        parts: forms by (number, n) of the n-th call of a part; only where they were looked at.
    """

    layers: dict[Any, Form | None] = field(default_factory=dict)
    parts: dict[Any, Form | None] = field(default_factory=dict)

    def with_later(self, later: Forms) -> Forms:
        """These, and those of a later stage."""
        return Forms({**self.layers, **later.layers}, {**self.parts, **later.parts})

    def differ(self, other: Forms) -> bool:
        """Whether they contradict each other."""
        return self.layers != other.layers or bool(self.parts and other.parts and self.parts != other.parts)


def form_of(value: Any, depth: int = 0) -> Form | None:
    """The form of what a call returned; ``None`` where it holds objects of other kinds."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.is_cpu
    kind: Any = type(value)
    if kind in _SCALARS:
        return _Plain(value)
    if kind not in _NESTS or depth == _DEEPEST:
        return None
    keys, values = (tuple(value), value.values()) if kind is dict else ((), value)
    entries = tuple(form_of(entry, depth + 1) for entry in values)
    if None in entries or any(type(key) not in (str, int) for key in keys):
        return None
    return _Nest(kind, keys, entries)


def filled(form: Form, device: torch.device, fill: Callable[[torch.Size, torch.dtype, torch.device], Any]) -> Any:
    """Something of this form.

    Args:
        form: as :func:`form_of` gave it, here or on another stage.
        device: where this stage computes.
        fill: makes a tensor of a shape and dtype on a device.
    """
    if type(form) is _Plain:
        return form.value
    if type(form) is not _Nest:
        shape, dtype, on_cpu = form
        return fill(torch.Size(shape), dtype, torch.device("cpu") if on_cpu else device)
    entries = [filled(entry, device, fill) for entry in form.entries]
    return dict(zip(form.keys, entries, strict=True)) if form.kind is dict else form.kind(entries)


def shapes_of(form: Form | None) -> list[tuple[int, ...]]:
    """Shapes of the tensors in a form, in their order."""
    if form is None or type(form) is _Plain:
        return []
    if type(form) is _Nest:
        return [shape for entry in form.entries for shape in shapes_of(entry)]
    return [form[0]]
