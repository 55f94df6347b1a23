"""Values of tensors: a dictionary whose keys are tensors, by identity, for as long as they live.

As torch's ``WeakTensorKeyDictionary``, whose look-ups make an object each. Trials look up every argument of every
call of a step, most of which they know nothing of.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from torch import Tensor

Value = TypeVar("Value")


class TensorNotes(Generic[Value]):
    """Values by tensor; a value goes with its tensor."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Value]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, tensor: Tensor) -> bool:
        entry = self._entries.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def get(self, tensor: Tensor) -> Value | None:
        """The value of a tensor; ``None`` where it has none."""
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def __setitem__(self, tensor: Tensor, value: Value) -> None:
        key, entries = id(tensor), self._entries

        def forget(gone: weakref.ref[Tensor]) -> None:
            entry = entries.get(key)
            if entry is not None and entry[0] is gone:  # not of another tensor that is where this one was
                del entries[key]

        entries[key] = weakref.ref(tensor, forget), value
