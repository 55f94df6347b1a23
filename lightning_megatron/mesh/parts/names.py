"""Dotted names: what holds what, and which part of a module a name lies in.

Stages, tensor-parallel regions, copies and placements all divide a module by naming parts of it, and then ask of a
parameter or a submodule which part it belongs to::

    parts = Parts(["net.layers.0", "net.layers.1", "net.head"])
    parts.of("net.layers.1.mlp.weight")   "net.layers.1"
    parts.of("net.head")                  "net.head"
    parts.of("net.layers.10")             None: outside of all of them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def parent(name: str) -> str:
    """Name of the module that holds ``name``; empty, which is the whole module, at the top."""
    return name.rpartition(".")[0]


def outwards(name: str) -> Iterator[str]:
    """``name``, then what holds it, from the inside out; the last is the empty name, the whole module.

    ``"a.b.c"`` gives ``"a.b.c"``, ``"a.b"``, ``"a"``, ``""``.
    """
    while name:
        yield name
        name = parent(name)
    yield ""


def lies_in(name: str, part: str) -> bool:
    """Whether ``name`` is the part called ``part``, or something in it; everything lies in the empty name."""
    return not part or name == part or name.startswith(f"{part}.")


class Parts:
    """Named parts of a module.

    Args:
        names: dotted names of submodules or parameters, which may lie in each other; the empty one is the whole module.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def of(self, name: str) -> str | None:
        """The innermost part that is ``name`` or holds it; ``None`` if it lies outside of all of them."""
        return next((each for each in outwards(name) if each in self._names), None)

    def __contains__(self, name: str) -> bool:
        """Whether ``name`` is one of the parts, or lies in one."""
        return self.of(name) is not None
