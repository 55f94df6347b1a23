"""Reading, from the module's own code, which submodules run before the trunk and which after it.

Registration order does not say when a submodule runs (OPT registers its final norm before its layers), and no batch
exists when the stages are built. So the source of ``training_step`` and of every ``forward`` it leads to is read as a
syntax tree, in the order Python would evaluate it. What cannot be read is reported as unknown, and the partition then
keeps it on every stage: a wrong guess could cost numbers, an unknown costs only memory.

::

    x = self.wte(tokens) + self.wpe     BEFORE
    for block in self.h:                DURING   (anything else named in the loop)
        x = block(x)
    return self.head(self.ln_f(x))      AFTER
"""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_megatron.pipeline.trunk import Trunk

STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
_INERT_CALLS = {
    "len",
    "enumerate",
    "zip",
    "list",
    "tuple",
    "range",
    "isinstance",
    "reversed",
    "iter",
    "hasattr",
    "print",
}
_INERT_ATTRIBUTES = {"dtype", "device", "shape", "size", "ndim", "num_embeddings", "embedding_dim", "in_features",
                     "out_features", "training", "config"}  # fmt: skip


class Phase(enum.IntEnum):
    """When something is used, relative to the trunk."""

    BEFORE = 0
    DURING = 1
    AFTER = 2


Uses = dict[str, set[Phase]]
"""Dotted name of a submodule or parameter -> the phases in which the code uses it."""


def read_uses(module: nn.Module, trunk: Trunk, entry_points: tuple[str, ...] = STEP_METHODS) -> Uses:
    """Phases in which each submodule and each direct parameter outside the trunk is used.

    Args:
        module: the whole module.
        trunk: its trunk.
        entry_points: methods where evaluation starts; missing ones are skipped.

    Returns:
        Uses by dotted name; names that the code never mentions are absent.
    """
    uses: Uses = {}
    for entry in entry_points:
        method = getattr(type(module), entry, None)
        if method is None or getattr(method, "__module__", "").startswith(("lightning.", "torch.nn.modules.module")):
            continue
        _Reader(module, trunk, uses).read_method(module, method)
    if not uses and "training_step" in entry_points:
        _Reader(module, trunk, uses).read_method(module, type(module).forward)
    return uses


class _Reader:
    """Walks syntax trees in evaluation order, carrying the phase and the local aliases of modules."""

    def __init__(self, root: nn.Module, trunk: Trunk, uses: Uses) -> None:
        self.uses = uses
        self.phase = Phase.BEFORE
        self.names = {id(child): name for name, child in root.named_modules()}
        self.names |= {id(parameter): name for name, parameter in root.named_parameters()}
        self.container = root.get_submodule(trunk.name)
        self.last_layer = root.get_submodule(trunk.layer_names[-1])
        self.layers = {id(layer) for layer in trunk.layers(root)}
        prefixes = [""] + [trunk.name[:i] for i, char in enumerate(trunk.name) if char == "."]
        self.ancestors = {id(root.get_submodule(prefix)) for prefix in prefixes}
        self.active: set[tuple[int, str]] = set()
        self.scope: dict[str, Any] = {}
        self.owner_class: type | None = None

    def read_method(self, owner: nn.Module, method: Callable[..., Any]) -> None:
        """Read ``method`` with ``self`` bound to ``owner``; silently skips code without source."""
        function = inspect.unwrap(method)
        key = (id(owner), getattr(function, "__qualname__", repr(function)))
        if key in self.active:
            return
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return
        definition = tree.body[0]
        if not isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) or not definition.args.args:
            return
        outer_scope, outer_class = self.scope, self.owner_class
        self.scope = {definition.args.args[0].arg: owner}
        self.owner_class = _defining_class(type(owner), function)
        self.active.add(key)
        self.visit_all(definition.body)
        self.active.discard(key)
        self.scope, self.owner_class = outer_scope, outer_class

    def visit_all(self, nodes: list[Any]) -> None:
        for node in nodes:
            self.visit(node)

    def visit(self, node: ast.AST) -> None:
        handler = getattr(self, f"visit_{type(node).__name__}", None)
        if handler is not None:
            handler(node)
        else:
            self.visit_all(list(ast.iter_child_nodes(node)))

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.resolve(node.value)
        if isinstance(value, nn.Module) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self.scope[node.targets[0].id] = value
            return
        self.visit(node.value)
        self.visit_all(list(node.targets))

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        before = self.phase
        self.visit_all(node.body)
        after_body, self.phase = self.phase, before
        self.visit_all(node.orelse)
        self.phase = max(self.phase, after_body)

    def visit_For(self, node: ast.For) -> None:
        self._visit_loop(node, [node.iter, *node.body])

    def visit_While(self, node: ast.While) -> None:
        self._visit_loop(node, [node.test, *node.body])

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._visit_loop(node, [*(generator.iter for generator in node.generators), node.elt])

    visit_GeneratorExp = visit_ListComp

    def _visit_loop(self, node: Any, parts: list[ast.AST]) -> None:
        runs_trunk = self.phase is not Phase.AFTER and any(self._mentions_trunk(part) for part in parts)
        if runs_trunk:
            self.phase = Phase.DURING
        self.visit_all(parts)
        if runs_trunk:
            self.phase = Phase.AFTER
        self.visit_all(getattr(node, "orelse", []))

    def _mentions_trunk(self, node: ast.AST) -> bool:
        return any(
            isinstance(child, (ast.Name, ast.Attribute, ast.Subscript)) and self.resolve(child) is self.container
            for child in ast.walk(node)
            if not (isinstance(child, ast.Call) and self._is_inert(child))
        ) and not self._only_length(node)

    def _only_length(self, node: ast.AST) -> bool:
        """Whether every mention of the trunk is ``len(trunk)``."""
        measured = [c for c in ast.walk(node) if isinstance(c, ast.Call) and getattr(c.func, "id", "") == "len"]
        inside = sum(self.resolve(child) is self.container for call in measured for child in call.args)
        total = sum(
            self.resolve(child) is self.container
            for child in ast.walk(node)
            if isinstance(child, (ast.Name, ast.Attribute))
        )
        return 0 < total <= inside

    def visit_Call(self, node: ast.Call) -> None:
        target = self.resolve(node.func)
        self.visit_all([*node.args, *(keyword.value for keyword in node.keywords)])
        if isinstance(target, nn.Module):
            self._call_module(target)
        elif inspect.ismethod(target) and isinstance(target.__self__, nn.Module):
            self._call_method(target)
        else:
            self.visit(node.func)
            if not self._is_inert(node) and self._passes_trunk(node):
                self.phase = Phase.AFTER

    def _call_module(self, module: nn.Module) -> None:
        if module is self.container:
            self.phase = Phase.AFTER
        elif id(module) in self.layers:
            self.phase = Phase.AFTER if module is self.last_layer else Phase.DURING
        elif id(module) in self.ancestors:
            self.read_method(module, type(module).forward)
        else:
            self._use(module)

    def _call_method(self, method: Any) -> None:
        owner = method.__self__
        if method.__name__ in ("forward", "__call__"):
            self._call_module_forward(owner, method)
        elif id(owner) in self.ancestors:
            self.read_method(owner, method.__func__)
        else:
            self._use(owner)

    def _call_module_forward(self, owner: nn.Module, method: Any) -> None:
        if id(owner) in self.ancestors:
            self.read_method(owner, method.__func__ if method.__name__ == "forward" else type(owner).forward)
        else:
            self._call_module(owner)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _INERT_ATTRIBUTES:
            return
        value = self.resolve(node)
        if isinstance(value, nn.Module):
            if value is not self.container and id(value) not in self.ancestors:
                self._use_anywhere(value)
        elif isinstance(value, nn.Parameter):
            owner = self.resolve(node.value)
            if isinstance(owner, nn.Module) and id(owner) in self.ancestors:
                self._use(value)
            else:
                self._use_anywhere(value)
        else:
            self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        value = self.resolve(node)
        if isinstance(value, nn.Module):
            if value is not self.container and id(value) not in self.ancestors | self.layers:
                self._use(value)
        else:
            self.visit(node.value)
        self.visit(node.slice)

    def visit_Name(self, node: ast.Name) -> None:
        value = self.scope.get(node.id)
        if (
            isinstance(value, nn.Module)
            and value is not self.container
            and id(value) not in self.ancestors | self.layers
        ):
            self._use_anywhere(value)

    def _use(self, target: Any) -> None:
        name = self.names.get(id(target))
        if name:
            self.uses.setdefault(name, set()).add(self.phase)

    def _use_anywhere(self, target: Any) -> None:
        """A mention that is not a call: its value may be used at any later point."""
        for phase in Phase:
            if phase >= self.phase and phase is not Phase.DURING:
                name = self.names.get(id(target))
                if name:
                    self.uses.setdefault(name, set()).add(phase)
        if self.phase is Phase.DURING:
            self._use(target)

    def _is_inert(self, node: ast.Call) -> bool:
        return isinstance(node.func, ast.Name) and node.func.id in _INERT_CALLS

    def _passes_trunk(self, node: ast.Call) -> bool:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        return any(self.resolve(argument) is self.container for argument in arguments)

    def resolve(self, node: ast.AST) -> Any:
        """The module, parameter or bound method that an expression names, or ``None``."""
        if isinstance(node, ast.Name):
            return self.scope.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._resolve_attribute(node)
        if isinstance(node, ast.Subscript):
            return self._resolve_subscript(node)
        return None

    def _resolve_attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super" and self.owner_class:
            owner = next((value for value in self.scope.values() if isinstance(value, self.owner_class)), None)
            return getattr(super(self.owner_class, owner), node.attr, None) if owner is not None else None
        base = self.resolve(node.value)
        if not isinstance(base, nn.Module):
            return None
        for table in (base._modules, base._parameters):
            if node.attr in table:
                return table[node.attr]
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


def _defining_class(owner: type, function: Any) -> type | None:
    for base in owner.__mro__:
        candidate = base.__dict__.get(getattr(function, "__name__", ""))
        if candidate is not None and inspect.unwrap(candidate) is function:
            return base
    return None
