"""Reads from the module's source code which submodules run before the trunk and which after it.

Registration order does not tell when a submodule runs (OPT registers its final norm before its layers), and there is no
batch yet when the stages are built. Therefore the source of ``training_step``, and of every ``forward`` that it calls,
is parsed, and its syntax tree is visited in evaluation order. Submodules that the code does not mention have no phase,
and the partition places them on every stage: a wrong guess could change results, while this only costs memory.

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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from lightning_megatron.mesh.parts.packages import LIGHTNING, comes_from
from lightning_megatron.mesh.parts.syntax import definition_of
from lightning_megatron.pipeline.cut.flows import NOTHING, Flows, Parts, is_variable, names_in, results_in, returns
from lightning_megatron.pipeline.cut.resolver import Resolver
from lightning_megatron.pipeline.cut.trunk import Trunk, holders_of

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


class When(enum.IntEnum):
    """When a submodule or parameter is used, relative to the trunk."""

    BEFORE = 0
    DURING = 1
    AFTER = 2


Uses = dict[str, set[When]]
"""Dotted name of a submodule or parameter -> when the code uses it."""


def read_uses(module: nn.Module, trunk: Trunk, entry_points: tuple[str, ...] = STEP_METHODS) -> Uses:
    """Find the phases in which the code uses each submodule and direct parameter outside the trunk.

    Args:
        module: the whole module.
        trunk: its trunk.
        entry_points: methods where evaluation starts; missing ones are skipped. If none of them uses anything,
            ``forward`` is read instead.

    Returns:
        Dotted name -> phases; names that the code never mentions are absent.
    """
    uses: Uses = {}
    for entry in entry_points:
        method = getattr(type(module), entry, None)
        if method is None or comes_from(method, *LIGHTNING, "torch.nn.modules.module"):
            continue
        _Reader(module, trunk, uses).read_method(module, method)
    if not uses and "training_step" in entry_points:
        _Reader(module, trunk, uses).read_method(module, type(module).forward)
    return uses


class _Reader(Resolver):
    """Visits syntax trees in evaluation order, and tracks the phase and the local names of modules."""

    def __init__(self, root: nn.Module, trunk: Trunk, uses: Uses) -> None:
        super().__init__()
        self.uses = uses
        self.phase = When.BEFORE
        self.names = {id(child): name for name, child in root.named_modules()}
        self.names |= {id(parameter): name for name, parameter in root.named_parameters()}
        self.container = root.get_submodule(trunk.name)
        self.last_layer = root.get_submodule(trunk.layer_names[-1])
        self.layers = {id(layer) for layer in trunk.layers(root)}
        self.ancestors = {id(module) for module in holders_of(self.container, root)}
        self.active: set[tuple[int, str]] = set()
        self.flows = Flows()
        self.loop_layers: set[str] = set()
        self.loop_results: set[str] = set()
        self.returned: list[When] = []

    def read_method(self, owner: nn.Module, method: Callable[..., Any], call: ast.Call | None = None) -> None:
        """Read ``method`` with ``self`` bound to ``owner``; code without source and recursive calls are skipped."""
        function = inspect.unwrap(method)
        key = (id(owner), getattr(function, "__qualname__", repr(function)))
        if key in self.active:
            return
        definition = definition_of(function)
        if definition is None or not definition.args.args:
            return
        outer_scope, outer_class, outer_returned = self.scope, self.owner_class, self.returned
        self.scope, self.returned = {definition.args.args[0].arg: owner}, []
        self.owner_class = _defining_class(type(owner), function)
        self.active.add(key)
        with self.flows.scope(self._argument_flows(definition, call)):
            self.visit_all(definition.body)
        self.phase = max([self.phase, *self.returned])
        self.active.discard(key)
        self.scope, self.owner_class, self.returned = outer_scope, outer_class, outer_returned

    def _argument_flows(
        self, definition: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call | None
    ) -> dict[str, Parts]:
        if call is None:
            return {}
        given: list[tuple[str, ast.expr]] = [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
        given += [(parameter.arg, value) for parameter, value in zip(definition.args.args[1:], call.args, strict=False)]
        return {name: NOTHING.union(*map(self.flows.of, names_in(value)), NOTHING) for name, value in given}

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
        self._bind(node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind([node.target], node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind([node.target], node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._bind([node.target], node.value, add=True)

    def _bind(self, targets: Sequence[ast.expr], value: ast.expr, *, add: bool = False) -> None:
        first = targets[0]
        if isinstance(first, ast.Tuple) and isinstance(value, ast.Tuple) and len(first.elts) == len(value.elts):
            for target, part in zip(first.elts, value.elts, strict=True):
                self._bind([target], part)
            return
        module = self.resolve(value)
        if isinstance(module, nn.Module) and len(targets) == 1 and isinstance(first, ast.Name) and not add:
            self.scope[first.id] = module
            return
        before = self.phase
        with self.flows.collecting() as found:
            self.visit(value)
        for target in targets:
            self.flows.bind(target, found if self.phase is before else NOTHING, add=add)
        self.visit_all(list(targets))

    def visit_Compare(self, node: ast.Compare) -> None:
        if not all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops):
            self.visit_all([node.left, *node.comparators])

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        before, ends = self.phase, []
        for branch in (node.body, node.orelse):
            self.phase = before
            self.visit_all(branch)
            if not returns(branch):  # what follows is not code after the layers because of a branch that left
                ends.append(self.phase)
        self.phase = max(ends, default=before)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self.visit(node.value)
        self.returned.append(self.phase)

    def visit_For(self, node: ast.For) -> None:
        self._visit_loop(node, [(node.target, node.iter)], node.body)

    def visit_While(self, node: ast.While) -> None:
        self._visit_loop(node, [], [node.test, *node.body])

    def visit_ListComp(self, node: ast.ListComp) -> None:
        bindings = [(generator.target, generator.iter) for generator in node.generators]
        self._visit_loop(node, bindings, [node.elt, *(test for part in node.generators for test in part.ifs)])

    visit_GeneratorExp = visit_SetComp = visit_ListComp  # type: ignore[assignment]

    def _visit_loop(self, node: Any, bindings: list[tuple[ast.expr, ast.expr]], body: Sequence[ast.AST]) -> None:
        sources = [source for _, source in bindings]
        runs_trunk = self.phase is not When.AFTER and any(self._mentions_trunk(part) for part in (*sources, *body))
        if runs_trunk:
            names = {name for target, source in bindings for name in self._layer_names(target, source)}
            runs_trunk = any(self._hands_on_layer(part, names) for part in body)
        if not runs_trunk:
            self.visit_all([*sources, *body])
        else:
            self._visit_trunk_loop([*sources, *body], names)
        self.visit_all(getattr(node, "orelse", []))

    def _visit_trunk_loop(self, body: Sequence[ast.AST], layers: set[str]) -> None:
        outer = self.loop_layers, self.loop_results
        runs = partial(self._hands_on_layer, names=layers)
        self.loop_layers, self.loop_results = layers, results_in(body, runs)
        self.phase = When.DURING
        self.visit_all(list(body))
        self.phase = When.AFTER
        self.flows.forget(self.loop_results)
        self.loop_layers, self.loop_results = outer

    def _layer_names(self, target: ast.expr, source: ast.expr) -> set[str]:
        """Loop variables that hold layers in ``for target in source``."""
        if not self._mentions_trunk(source):
            return set()
        call = source if isinstance(source, ast.Call) else None
        name = getattr(call.func, "id", getattr(call.func, "attr", "")) if call is not None else ""
        if isinstance(target, ast.Tuple) and call is not None:
            if name in ("enumerate", "items") and len(target.elts) == 2:
                return names_in(target.elts[1])
            if name == "zip" and len(target.elts) == len(call.args):
                pairs = zip(target.elts, call.args, strict=True)
                return {found for part, argument in pairs for found in self._layer_names(part, argument)}
        return names_in(target)

    def _hands_on_layer(self, node: ast.AST, names: set[str]) -> bool:
        """Whether ``node`` calls a layer or passes it on; ``layer.init_state(...)`` alone does not run it."""
        if self._is_layer(node, names):
            return True
        if isinstance(node, ast.Attribute) and self._is_layer(node.value, names):
            return node.attr in ("forward", "__call__", "values", "items", "modules", "children")
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "len":
            return False
        return any(self._hands_on_layer(child, names) for child in ast.iter_child_nodes(node))

    def _is_layer(self, node: ast.AST, names: set[str]) -> bool:
        return (isinstance(node, ast.Name) and node.id in names) or self.resolve(node) is self.container

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
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if self.phase is When.DURING and any(
            self._hands_on_layer(p, self.loop_layers) for p in [node.func, *arguments]
        ):
            # Variables passed to layers cross stages with the hidden state.
            arguments = [part for part in arguments if not is_variable(part)]
        if getattr(node.func, "id", "") != "len":
            self.visit_all(arguments)
        if isinstance(target, nn.Module):
            self._call_module(target, node)
        elif inspect.ismethod(target) and isinstance(target.__self__, nn.Module):
            self._call_method(target, node)
        else:
            self.visit(node.func)
            if not self._is_inert(node) and self._passes_trunk(node):
                self.phase = When.AFTER

    def _call_module(self, module: nn.Module, call: ast.Call) -> None:
        if module is self.container:
            self.phase = When.AFTER
        elif id(module) in self.layers:
            self.phase = When.AFTER if module is self.last_layer else When.DURING
        elif id(module) in self.ancestors and type(module).forward is nn.Sequential.forward:
            for child in module._modules.values():  # its own loop does not say which of them holds the layers
                self._call_module(child, call)  # type: ignore[arg-type]
        elif id(module) in self.ancestors:
            self.read_method(module, type(module).forward, call)
        else:
            self._use(module)

    def _call_method(self, method: Any, call: ast.Call) -> None:
        owner = method.__self__
        if method.__name__ in ("forward", "__call__"):
            self._call_module_forward(owner, method, call)
        elif id(owner) in self.ancestors:
            self.read_method(owner, method.__func__, call)
        else:
            self._use(owner)

    def _call_module_forward(self, owner: nn.Module, method: Any, call: ast.Call) -> None:
        if id(owner) in self.ancestors:
            forward = method.__func__ if method.__name__ == "forward" else type(owner).forward
            self.read_method(owner, forward, call)
        else:
            self._call_module(owner, call)

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
        if isinstance(node.ctx, ast.Store):
            return
        self._use_variable(node.id)
        value = self.scope.get(node.id)
        if (
            isinstance(value, nn.Module)
            and value is not self.container
            and id(value) not in self.ancestors | self.layers
        ):
            self._use_anywhere(value)

    def _use_variable(self, variable: str) -> None:
        """Note that a variable is read: this phase uses the parts that went into it, unless layers pass it on."""
        parts = self.flows.of(variable)
        self.flows.touch(parts)
        if self.phase is When.AFTER or (self.phase is When.DURING and variable not in self.loop_results):
            for part in parts:
                self.uses[part].add(self.phase)

    def _use(self, target: Any) -> None:
        name = self.names.get(id(target))
        if name and self.phase is When.BEFORE:
            self.flows.touch([name])
        if name:
            self.uses.setdefault(name, set()).add(self.phase)

    def _use_anywhere(self, target: Any) -> None:
        """Note a mention that is not a call: the value may be used now or at any later point."""
        for phase in When:
            if phase >= self.phase and phase is not When.DURING:
                name = self.names.get(id(target))
                if name:
                    self.uses.setdefault(name, set()).add(phase)
        if self.phase is When.DURING:
            self._use(target)

    def _is_inert(self, node: ast.Call) -> bool:
        return isinstance(node.func, ast.Name) and node.func.id in _INERT_CALLS

    def _passes_trunk(self, node: ast.Call) -> bool:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        return any(self.resolve(argument) is self.container for argument in arguments)


def _defining_class(owner: type, function: Any) -> type | None:
    for base in owner.__mro__:
        candidate = base.__dict__.get(getattr(function, "__name__", ""))
        if candidate is not None and inspect.unwrap(candidate) is function:
            return base
    return None
