"""Lists of layers that run one behind the other, which are no experts.

A list of like modules beside a parameter with a value for each of them looks like a mixture. So does a network of four
layers whose head has four outputs. What tells them apart is the loop that calls them::

    for layer in self.layers:                      for index, expert in enumerate(self.experts):
        x = layer(x)                layers             out = out + weight[index] * expert(x)        experts
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from torch import nn

from lightning_megatron.mesh.parts.names import parent
from lightning_megatron.pipeline.cut.syntax import definition_of

_LIBRARIES = ("torch", "lightning", "builtins")


def runs_in_turn(module: nn.Module, path: str) -> bool:
    """Whether code of a module, or of what holds one of its lists, gives what an entry returns to the next entry.

    Args:
        module: holds the list.
        path: dotted name of the list in it.
    """
    leaf, holder = path.rpartition(".")[2], path
    while holder:
        holder = parent(holder)
        if _loops(type(module.get_submodule(holder)), leaf):
            return True
    return False


def _loops(kind: type, leaf: str) -> bool:
    """Whether a method of a class goes over an attribute of this name, layer by layer."""
    methods: dict[str, object] = {}
    for owner in reversed(kind.__mro__):
        methods |= {} if owner.__module__.split(".")[0] in _LIBRARIES else vars(owner)
    for method in methods.values():
        definition = definition_of(method) if inspect.isfunction(method) else None
        loops = (node for node in ast.walk(definition) if isinstance(node, ast.For)) if definition else ()
        if any(_passes_on(loop) for loop in loops if leaf in _attributes(loop.iter)):
            return True
    return False


def _attributes(expression: ast.expr) -> set[str]:
    return {node.attr for node in ast.walk(expression) if isinstance(node, ast.Attribute)}


def _passes_on(loop: ast.For) -> bool:
    """Whether an entry is called with what the loop assigns from its call."""
    entries = _names(loop.target)
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign):
            made = {name for target in node.targets for name in _names(target)}
            if any(made & given for given in _given(node.value, entries)):
                return True
    return False


def _given(value: ast.expr, entries: set[str]) -> Iterator[set[str]]:
    """The names in what the entries are called with, call by call."""
    for call in ast.walk(value):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in entries:
            yield {name for given in (*call.args, *(word.value for word in call.keywords)) for name in _names(given)}


def _names(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
