"""Dotted names, and the named part of a module that a name lies in.

Stages, tensor-parallel regions, averaged copies and placements divide a module into named parts, and look up the part
that a parameter or submodule belongs to::

    parts = Parts(["net.layers.0", "net.layers.1", "net.head"])
    parts.of("net.layers.1.mlp.weight")   "net.layers.1"
    parts.of("net.head")                  "net.head"
    parts.of("net.layers.10")             None: outside of all of them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def parent(name: str) -> str:
    """Name of the module that contains ``name``; empty for the whole module."""
    return name.rpartition(".")[0]


def leaf_of(name: str) -> str:
    """Last word of ``name``: the attribute of the module that contains it."""
    return name.rpartition(".")[2]


def owner_and_leaf(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module inside ``module`` that has what is called ``name``, and its attribute there.

    Raises:
        AttributeError: there is no such module.
    """
    return module.get_submodule(parent(name)), leaf_of(name)


def called(module: nn.Module, name: str) -> Any:
    """The parameter, buffer or submodule of ``module`` that is called ``name``."""
    owner, leaf = owner_and_leaf(module, name)
    return getattr(owner, leaf)


def module_called(module: nn.Module, name: str) -> nn.Module | None:
    """The submodule that is called ``name``; ``None`` if a parameter is."""
    owner, leaf = owner_and_leaf(module, name)
    return owner._modules.get(leaf)


def outwards(name: str) -> Iterator[str]:
    """Yield ``name`` and all names that contain it, from the inside out: ``"a.b"``, ``"a"``, ``""`` for ``"a.b"``."""
    while name:
        yield name
        name = parent(name)
    yield ""


def lies_in(name: str, part: str) -> bool:
    """Whether ``name`` is ``part`` or lies inside of it; every name lies in the empty one, the whole module."""
    return not part or name == part or name.startswith(f"{part}.")


def unit_of(name: str) -> str:
    """The numbered layer that a submodule lies in, or the submodule itself: ``"net.h.2"`` for ``"net.h.2.mlp"``."""
    return [name, *(above for above in outwards(name) if leaf_of(above).isdigit())][-1]


class Parts:
    """A set of named parts of a module.

    Args:
        names: dotted names of submodules or parameters, possibly nested; the empty one is the whole module.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def of(self, name: str) -> str | None:
        """The innermost part that is ``name`` or contains it; ``None`` if no part does."""
        return next((each for each in outwards(name) if each in self._names), None)

    def __bool__(self) -> bool:
        """Whether there is any part."""
        return bool(self._names)

    def __contains__(self, name: str) -> bool:
        """Whether ``name`` is one of the parts, or lies in one."""
        return self.of(name) is not None
