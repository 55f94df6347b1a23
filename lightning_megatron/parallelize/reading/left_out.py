"""Layers of a list that code may leave out, so that what one of them gives is not always read by the same other one.

A trace shows one run. Linear layers in different entries of a list are a pair only while a loop calls both entries::

    for layer in self.layers:
        if random.random() < self.drop:
            continue                        # without the entry with B, the next one is given a part of f(x A)
        x = layer(x)                        # f(x A), then (..) B

Which code may do so is read in its source. Code that is wrongly taken for it costs messages, and no number: the outputs
of the pairs are gathered, so that each entry takes and gives whole tensors.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType

from torch import nn

from lightning_megatron.mesh.parts.names import leaf_of, outwards, parent
from lightning_megatron.mesh.parts.packages import FRAMEWORKS, comes_from
from lightning_megatron.mesh.parts.syntax import definition_in, place_in

_HOOKS = ("__init__", "setup", "teardown", "on_", "configure_")  # begin names of methods that run no step
_ENDS = (ast.If, ast.IfExp, ast.Match, ast.Break, ast.Continue)


def leaves_entries_out(module: nn.Module, name: str) -> str:
    """File and line of code that may call some entries of a container and not the others, or "".

    Args:
        module: holds the container.
        name: of the container; of any other module, whose code calls what it has, the answer is "".
    """
    if not isinstance(module.get_submodule(name), (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return ""
    while leaf_of(name).isdigit():  # a list in a list
        name = parent(name)
    holders = (type(module.get_submodule(holder)) for holder in outwards(parent(name)))
    codes = (code for kind in holders for code in _codes_of(kind))
    return next(filter(None, (_leaves_out(code, leaf_of(name)) for code in codes)), "") if name else ""


def _codes_of(kind: type) -> Iterator[CodeType]:
    for owner in kind.__mro__:
        if not comes_from(owner, *FRAMEWORKS, "builtins"):
            methods = [method for name, method in vars(owner).items() if not name.startswith(_HOOKS)]
            for method in methods:
                code = getattr(inspect.unwrap(method), "__code__", None) if inspect.isfunction(method) else None
                if code is not None:
                    yield code


@functools.lru_cache(maxsize=4096)
def _leaves_out(code: CodeType, attribute: str) -> str:
    definition = definition_in(code)
    nodes = ast.walk(definition) if definition else ()
    return next((place_in(code, node.lineno) for node in nodes if _chooses(node, attribute)), "")  # type: ignore[attr-defined]


def _chooses(node: ast.AST, attribute: str) -> bool:
    """Whether a loop over the entries has a condition, a condition has an entry, or a part of them is taken."""
    if isinstance(node, (ast.For, ast.While, ast.ListComp, ast.GeneratorExp)):
        inside = list(ast.walk(node))
        filtered = any(isinstance(each, ast.comprehension) and each.ifs for each in inside)
        return _names(inside, attribute) and (filtered or any(isinstance(each, _ENDS) for each in inside))
    if isinstance(node, (ast.If, ast.IfExp)):
        taken = (each.value for each in ast.walk(node) if isinstance(each, ast.Subscript))
        return _names(taken, attribute)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        bounds = ast.walk(node.slice)
        return _names([node.value], attribute) and any(isinstance(each, (ast.Name, ast.Attribute)) for each in bounds)
    return False


def _names(nodes: Iterable[ast.AST], attribute: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == attribute for node in nodes)
