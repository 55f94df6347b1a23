"""Methods that a run puts in the place of those of the user's objects, for as long as it lasts.

``module.log`` and hooks of callbacks lead through this package while a run goes on. The replacement is an attribute of
that one object, so a copy of the object would take it along, and with it the run: process groups, which cannot be
pickled, and a Trainer that the copy does not belong to. A copy, and what another process unpickles, gets the method of
its own class in that place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class Replacement:
    """Stands for a method of one object; subclasses define ``__call__``.

    Args:
        owner: the object.
        name: of the method.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._replaces = owner, name

    def __reduce__(self) -> Any:
        return own_method, self._replaces

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the method."""
        raise NotImplementedError


class Replaced(Replacement):
    """Stands for a method of one object: calls a function.

    Args:
        owner: the object.
        name: of the method.
        function: to call; may name the function that it wraps, as `functools.wraps` does.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        super().__init__(owner, name)
        self.__name__, self.__wrapped__ = name, inspect.unwrap(function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :class:`Replacement`."""
        return self._function(*args, **kwargs)


def own_method(owner: Any, name: str) -> Any:
    """The method ``name`` of the class of ``owner``."""
    return getattr(type(owner), name).__get__(owner)


def has_other_method(owner: Any, name: str) -> bool:
    """Whether ``owner`` has a method of its own that is not its class's."""
    return name in owner.__dict__ and owner.__dict__[name] != own_method(owner, name)
