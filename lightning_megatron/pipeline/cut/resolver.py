"""Resolves an expression in the user's code to the submodule, parameter or method that it names."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule


class Resolver:
    """Resolves expressions by looking them up in a module tree.

    Attributes:
        scope: local name -> module, in the method being read.
        owner_class: class that defines the method being read.
    """

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {}
        self.owner_class: type | None = None

    def resolve(self, node: ast.AST) -> Any:
        """The module, parameter or bound method that an expression names, or ``None``."""
        if isinstance(node, ast.Name):
            return self.scope.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._resolve_attribute(node)
        if isinstance(node, ast.Subscript):
            return self._resolve_subscript(node)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) >= 2:
            name = self._string(node.args[1])
            return self._resolve_attribute(ast.Attribute(node.args[0], name)) if name else None
        return None

    def _string(self, node: ast.expr) -> str:
        """Value of a string constant or of a module's string attribute; empty for other expressions."""
        value = getattr(node, "value", None)
        if isinstance(node, ast.Attribute):
            base = self.resolve(node.value)
            value = getattr(base, node.attr, None) if isinstance(base, nn.Module) else None
        return value if isinstance(value, str) else ""

    def _resolve_attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super" and self.owner_class:
            owner = next((value for value in self.scope.values() if isinstance(value, self.owner_class)), None)
            return getattr(super(self.owner_class, owner), node.attr, None) if owner is not None else None
        base = self.resolve(node.value)
        if not isinstance(base, nn.Module):
            return None
        for table in (base._modules, base._parameters):
            if node.attr in table:
                found = table[node.attr]
                return found._orig_mod if isinstance(found, OptimizedModule) else found
        descriptor = inspect.getattr_static(type(base), node.attr, None)
        if isinstance(descriptor, property):
            return _read_property(base, node.attr)
        return getattr(base, node.attr, None) if callable(descriptor) else base.__dict__.get(node.attr)

    def _resolve_subscript(self, node: ast.Subscript) -> Any:
        base = self.resolve(node.value)
        if not isinstance(base, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            return None
        if isinstance(node.slice, ast.Constant):
            children: Any = base
            try:
                return children[node.slice.value]
            except (KeyError, IndexError, TypeError):
                return base
        return base


def _read_property(module: nn.Module, name: str) -> Any:
    """Value of a property if it is a module (``self.base_model``); properties may fail outside a run."""
    try:
        value = getattr(module, name)
    except Exception:
        return None
    return value if isinstance(value, nn.Module) else None
