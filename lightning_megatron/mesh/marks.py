"""What one run leaves behind on objects of the user's, for the next run to find.

A module stays cut and split after a run, a loader knows how far it was read. That has to live as long as the object
and no longer, and the object may be handed to another Trainer and another strategy, so it is kept with the object: in
one :class:`Marks`, one value per class.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")
_NAME = "_lightning_megatron"


class Marks:
    """What is remembered of one object, by class.

    It is a plain attribute in the object's ``__dict__``: not in a module's ``state_dict``, and copied or pickled with
    the object, as a deep copy of a module that is cut is cut too.

    Args:
        owner: the object. It gets the attribute with the first value.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._values: dict[type, Any] = {}

    @classmethod
    def of(cls, owner: Any) -> Marks:
        """The marks of ``owner``; none as long as nothing was put."""
        found = owner.__dict__.get(_NAME)
        return found if isinstance(found, Marks) else cls(owner)

    def get(self, kind: type[T]) -> T | None:
        """The value of this class."""
        value: T | None = self._values.get(kind)
        return value

    def put(self, value: T) -> T:
        """Remember ``value``, in place of an earlier one of its class, and return it."""
        self._values[type(value)] = value
        self._owner.__dict__[_NAME] = self
        return value

    def take(self, kind: type[T]) -> T | None:
        """Forget the value of this class, and return it; with the last one the attribute goes."""
        value: T | None = self._values.pop(kind, None)
        if not self._values:
            self._owner.__dict__.pop(_NAME, None)
        return value
