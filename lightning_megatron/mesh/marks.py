"""Values that a run attaches to the user's objects, for later runs to find.

A module stays cut and split after a run, and a loader knows how far it was read. This state must live as long as the
object, which may go to another Trainer and another strategy. It is therefore stored on the object itself: in one
:class:`Marks`, with one value per class.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")
ATTRIBUTE = "_lightning_megatron"
"""Where they are on an object."""


class _Attached:
    """Values stored on the object, by class. No dictionary, which would pass for one that user code fills."""

    __slots__ = ("by_class",)

    def __init__(self) -> None:
        self.by_class: dict[type, Any] = {}


class Marks:
    """The values attached to one object, at most one per class.

    They are in the object's ``__dict__``: not part of a module's ``state_dict``, but copied and pickled with the
    object, as the deep copy of a cut module is cut too. They do not refer to the object, so a copy is freed with its
    last reference.

    Args:
        owner: the object; it gets its attribute with the first value.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    @classmethod
    def of(cls, owner: Any) -> Marks:
        """The marks of ``owner``; empty ones if nothing is attached."""
        return cls(owner)

    def get(self, kind: type[T]) -> T | None:
        """The value of class ``kind``, or ``None``."""
        attached = self._owner.__dict__.get(ATTRIBUTE)
        return None if attached is None else attached.by_class.get(kind)

    def put(self, value: T) -> T:
        """Attach ``value``, replacing an earlier one of its class, and return it."""
        self._owner.__dict__.setdefault(ATTRIBUTE, _Attached()).by_class[type(value)] = value
        return value

    def take(self, kind: type[T]) -> T | None:
        """Detach and return the value of class ``kind``, or ``None``; with the last value the attribute goes too."""
        attached = self._owner.__dict__.get(ATTRIBUTE)
        if attached is None:
            return None
        value: T | None = attached.by_class.pop(kind, None)
        if not attached.by_class:
            del self._owner.__dict__[ATTRIBUTE]
        return value


def is_marked(owner: Any) -> bool:
    """Whether an earlier run has attached something."""
    return ATTRIBUTE in owner.__dict__
