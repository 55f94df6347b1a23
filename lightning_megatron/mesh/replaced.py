"""Replaces attributes of objects that are not the run's own, and gives them back at its end.

``module.log``, hooks of callbacks, functions of torch and methods of Lightning's Trainer lead through this package
while a run goes on. All of them are replaced here, by :class:`Replacements`, which knows what was there before::

    put    callback.on_fit_end     the class's    ──▶  a                 by the run's logs
    put    callback.on_fit_end     a              ──▶  b                 by something else
    the first takes back: b stays, and the class's method is what b's owner will give back

A replacement of a method is an attribute of one object, so a copy of the object would take it along, and with it the
run: process groups, which cannot be pickled, and a Trainer that the copy does not belong to. A copy, and what another
process unpickles, gets the method of its own class in that place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

_MISSING: Any = object()


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


class _Replaced:
    """One attribute that is replaced; ``before`` is what it was, or that its owner had none of its own."""

    __slots__ = ("__weakref__", "before", "name", "owner", "value")

    def __init__(self, owner: Any, name: str, value: Any, before: Any) -> None:
        self.owner, self.name, self.value, self.before = owner, name, value, before


_STANDING: WeakSet[_Replaced] = WeakSet()
"""Entries that nobody has taken back: several runs may replace the same attribute of a class or a module."""


class Replacements:
    """Attributes of other objects that are replaced until :meth:`take_back`; also a context, at whose end they are."""

    def __init__(self) -> None:
        self._entries: list[_Replaced] = []

    def __enter__(self) -> Replacements:
        return self

    def __exit__(self, *_: object) -> None:
        self.take_back()

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Put ``value`` in the place of an attribute.

        Args:
            owner: an object, a class or a module. Of an object the attribute itself is set, past ``__setattr__``.
            name: of the attribute.
            value: what it is until it is taken back.

        Raises:
            AttributeError: there is no such attribute: another version of a library has another name for it.
        """
        getattr(owner, name)
        entry = _Replaced(owner, name, value, vars(owner).get(name, _MISSING))
        _write(owner, name, value)
        self._entries.append(entry)
        _STANDING.add(entry)

    def call(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let a method of an object call ``function`` instead, except in copies; see :class:`Replaced`, :meth:`put`."""
        self.put(owner, name, Replaced(owner, name, function))

    def take_back(self) -> None:
        """Give every attribute back, the latest first. What other code has set one to since stays."""
        while self._entries:
            entry = self._entries.pop()
            _STANDING.discard(entry)
            if vars(entry.owner).get(entry.name, _MISSING) is entry.value:
                _write(entry.owner, entry.name, entry.before)
                continue
            for later in _STANDING:
                if later.owner is entry.owner and later.name == entry.name and later.before is entry.value:
                    later.before = entry.before


def _write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    elif value is _MISSING:
        del owner.__dict__[name]
    else:
        owner.__dict__[name] = value


def around_calls(function: Callable[..., Any], replace: Callable[[Replacements], None]) -> Callable[..., Any]:
    """``function``, around each of whose calls the attributes are replaced that ``replace`` puts."""

    @functools.wraps(function)
    def calling(*args: Any, **kwargs: Any) -> Any:
        with Replacements() as replaced:
            replace(replaced)
            return function(*args, **kwargs)

    return calling


def own_method(owner: Any, name: str) -> Any:
    """The method ``name`` of the class of ``owner``."""
    return getattr(type(owner), name).__get__(owner)


def has_other_method(owner: Any, name: str) -> bool:
    """Whether ``owner`` has a method of its own that is not its class's."""
    return name in owner.__dict__ and owner.__dict__[name] != own_method(owner, name)
