"""Lists of layers that run one after the other, which are no experts.

A list of like modules beside a parameter with a value for each of them looks like a mixture. So does a network of four
layers whose head has four outputs. What tells them apart is the loop that calls them::

    for layer in self.layers:                      for index, expert in enumerate(self.experts):
        x = layer(x)                layers             out = out + weight[index] * expert(x)        experts
"""

from __future__ import annotations

import ast
import functools
import inspect
from types import CodeType

from torch import nn

from lightning_megatron.mesh.parts.bytecode import names_in as names_used
from lightning_megatron.mesh.parts.names import leaf_of, parent
from lightning_megatron.mesh.parts.packages import FRAMEWORKS, comes_from
from lightning_megatron.mesh.parts.syntax import definition_in
from lightning_megatron.pipeline.cut.flows import names_in


def runs_in_turn(module: nn.Module, path: str) -> bool:
    """Whether code of a module, or of what holds one of its lists, gives what an entry returns to the next entry.

    Args:
        module: holds the list.
        path: dotted name of the list in it.
    """
    leaf, holder = leaf_of(path), path
    while holder:
        holder = parent(holder)
        if _loops(type(module.get_submodule(holder)), leaf):
            return True
    return False


def _loops(kind: type, leaf: str) -> bool:
    """Whether a method of a class goes over an attribute of this name, layer by layer."""
    methods: dict[str, object] = {}
    for owner in reversed(kind.__mro__):
        methods |= {} if comes_from(owner, *FRAMEWORKS, "builtins") else vars(owner)
    codes = (
        getattr(inspect.unwrap(method), "__code__", None) for method in methods.values() if inspect.isfunction(method)
    )
    return any(leaf in names_used(code) and leaf in _gone_through(code) for code in codes if code is not None)


@functools.lru_cache(maxsize=4096)
def _gone_through(code: CodeType) -> frozenset[str]:
    """Attributes that a function goes over layer by layer."""
    definition = definition_in(code)
    loops = [node for node in ast.walk(definition) if isinstance(node, ast.For)] if definition else []
    return frozenset(name for loop in loops if _passes_on(loop) for name in _attributes(loop.iter))


def _attributes(expression: ast.expr) -> set[str]:
    return {node.attr for node in ast.walk(expression) if isinstance(node, ast.Attribute)}


def _passes_on(loop: ast.For) -> bool:
    """Whether each entry is called, always and with all of it, with what the loop assigns from the call before."""
    entries, nodes = names_in(loop.target), list(ast.walk(loop))
    if any(isinstance(node, (ast.If, ast.IfExp, ast.Subscript)) for node in nodes):
        return False  # some rows, or some entries: a mixture may write what experts give over what they were given
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            call = _call_in(node.value, entries)
            if (
                isinstance(target, ast.Name)
                and call is not None
                and any(target.id in names_in(arg) for arg in call.args)
            ):
                return True
    return False


def _call_in(value: ast.expr, entries: set[str]) -> ast.Call | None:
    """The call of an entry that a value is, but for what is added to it, and functions of it alone; no weight."""
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Name) and value.func.id in entries:
            return value
        return _call_in(value.args[0], entries) if len(value.args) == 1 and not value.keywords else None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _call_in(value.left, entries) or _call_in(value.right, entries)
    return None
