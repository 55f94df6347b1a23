"""Values that a run attaches to the user's objects, for later runs to find.

A module stays cut and split after a run, and a loader knows how far it was read. This state must live as long as the
object, which may go to another Trainer and another strategy. It is therefore stored on the object itself: in one
:class:`Marks`, with one value per class.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")
_NAME = "_lightning_megatron"


class Marks:
    """The values attached to one object, at most one per class.

    They are a dictionary in the object's ``__dict__``: not part of a module's ``state_dict``, but copied and pickled
    with the object, as the deep copy of a cut module is cut too. The dictionary does not refer to the object, so a copy
    is freed with its last reference.

    Args:
        owner: the object; the dictionary is put there with the first value.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    @classmethod
    def of(cls, owner: Any) -> Marks:
        """The marks of ``owner``; empty ones if nothing is attached."""
        return cls(owner)

    def get(self, kind: type[T]) -> T | None:
        """The value of class ``kind``, or ``None``."""
        value: T | None = self._owner.__dict__.get(_NAME, {}).get(kind)
        return value

    def put(self, value: T) -> T:
        """Attach ``value``, replacing an earlier one of its class, and return it."""
        self._owner.__dict__.setdefault(_NAME, {})[type(value)] = value
        return value

    def take(self, kind: type[T]) -> T | None:
        """Detach and return the value of class ``kind``, or ``None``; without values the dictionary is removed."""
        values = self._owner.__dict__.get(_NAME, {})
        value: T | None = values.pop(kind, None)
        if not values:
            self._owner.__dict__.pop(_NAME, None)
        return value
