"""Values that a module keeps from one step to the next, and reads there before it writes them anew.

A layer may leave what it likes on itself: an attention map, a loss of its own. Micro-batches write it one after the
other, and whoever reads it after the layer reads his own. But a memory (Transformer-XL), a running state or a cache
is read by the layer's *next* call::

    self.map = scores            written first: each micro-batch has its own
    if self.mem is not None:     read first: a later micro-batch would find the memory of the one before it,
        x = x + self.mem         and not that of the batch before
    self.mem = x.detach()

And a hook behind the step (``self.log("entropy", entropy_of(self.blocks[3].map))``) has to find there what the whole
batch has left, and not its last micro-batch.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Collection, Iterator
from types import CodeType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_megatron.mesh.parts.bytecode import codes_in, instructions_of
from lightning_megatron.mesh.parts.packages import is_users
from lightning_megatron.mesh.parts.syntax import definition_of
from lightning_megatron.strategy.lightning.hooks import foreign_callbacks, functions_of
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of

_BY_NAME = ("getattr", "hasattr")
_DEPTH = 4
_HOOKS = ("on_", "optimizer_", "lr_scheduler_", "configure_gradient_")


def reads_first(root: nn.Module, owner: str, key: Any) -> bool:
    """Whether the forward of a module, or the step, reads a value that it keeps before it has written it.

    Args:
        root: the user's module.
        owner: name of the module, or of something in an attribute of it.
        key: the attribute; or a key of what is in the attribute.
    """
    path, module = _module_above(root, owner)
    inner = owner[len(path) :].lstrip(".")
    name = inner.partition(".")[0] or key
    kind: Any = type(module)
    methods = ("forward",) if path else ("training_step", "forward")
    return isinstance(name, str) and any(_reads_first(kind, name, method) for method in methods)


def read_by_hooks(root: nn.Module, names: Collection[tuple[str, Any]]) -> set[tuple[str, Any]]:
    """Values among those that a module keeps that hooks of the user's, or of callbacks, may read around a step.

    Args:
        root: the user's module.
        names: of values: the module, or something in an attribute of it, and the attribute or a key in it.
    """
    trainer = getattr(root, "_trainer", None)
    if trainer is None or not isinstance(root, pl.LightningModule):
        return set()
    callbacks = foreign_callbacks(callbacks_of(trainer))
    owners: list[tuple[Any, type]] = [(root, pl.LightningModule), *((each, Callback) for each in callbacks)]
    loaded = {name for owner, kind in owners for name in _loaded_by_hooks(owner, kind)}
    found = set()
    for owner, key in names:
        path, _ = _module_above(root, owner)
        if not loaded.isdisjoint((*owner[len(path) :].split("."), key if isinstance(key, str) else "")):
            found.add((owner, key))
    return found


def _loaded_by_hooks(owner: Any, kind: type) -> Iterator[str]:
    """Names of attributes that hooks load, and the words that they give ``getattr``."""
    named = [hook for hook in dir(kind) if hook.startswith(_HOOKS) and callable(getattr(kind, hook))]
    for hook in (hook for hook in named if is_overridden(hook, owner, parent=kind)):
        for function in functions_of(owner, hook):
            yield from _loaded_by(function.__code__)


@functools.lru_cache(maxsize=4096)
def _loaded_by(code: CodeType) -> frozenset[str]:
    steps = [step for each in codes_in(code) for step in instructions_of(each)]
    names = {step.argval for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    return frozenset(names | {s.argval for s in steps if s.opname == "LOAD_CONST" and isinstance(s.argval, str)})


def _module_above(root: nn.Module, owner: str) -> tuple[str, nn.Module]:
    """The innermost module on the way to ``owner``."""
    path, module = "", root
    for word in owner.split(".") if owner else ():
        child = module._modules.get(word)
        if child is None:
            break
        path, module = f"{path}.{word}" if path else word, child
    return path, module


@functools.lru_cache(maxsize=4096)
def _reads_first(kind: type, name: str, method: str) -> bool:
    return _Order(kind, name).of(method) == "read"


class _Order(ast.NodeVisitor):
    """Whether an attribute of ``self`` is read or written first, in the order of the lines."""

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name
        self._self, self._depth, self._maybe = "self", 0, 0
        self._found = ""

    def of(self, method: str) -> str:
        """``"read"``, ``"written"``, or ``""`` where the code does neither, or cannot be read."""
        function = _parsed(self._kind, method)
        if function is None or not function.args.args or self._depth >= _DEPTH:
            return self._found
        before, self._self = self._self, function.args.args[0].arg
        self._depth += 1
        self._all(function.body)
        self._depth -= 1
        self._self = before
        return self._found

    def _all(self, nodes: Any) -> None:
        for node in nodes:
            if not self._found:
                self.visit(node)

    def _maybe_all(self, *bodies: Any) -> None:
        """Lines that may be passed by: what they write may not be written."""
        self._maybe += 1
        for body in bodies:
            self._all(body)
        self._maybe -= 1

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._maybe_all(node.body, node.orelse)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._maybe_all([node.target], node.body, node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._maybe_all(node.body, node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        self._maybe_all(node.body, *[handler.body for handler in node.handlers], node.orelse)
        self._all(node.finalbody)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._all([node.value, *node.targets])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._all([value for value in (node.value, node.target) if value is not None])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self._is_it(node.target):
            self._note("read")
        self._all([node.value, node.target])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._is_it(node):
            self.visit(node.value)
        elif isinstance(node.ctx, ast.Load):
            self._note("read")
        elif not self._maybe:
            self._note("written")

    def visit_Call(self, node: ast.Call) -> None:
        self._all([*node.args, *[keyword.value for keyword in node.keywords]])
        function = node.func
        if isinstance(function, ast.Name) and function.id in _BY_NAME and len(node.args) > 1:
            named = node.args[1]
            if isinstance(named, ast.Constant) and named.value == self._name:
                self._note("read")
        if isinstance(function, ast.Attribute) and self._is_self(function.value) and not self._is_it(function):
            self.of(function.attr)
        else:
            self.visit(function)

    def _is_self(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self._self

    def _is_it(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == self._name and self._is_self(node.value)

    def _note(self, what: str) -> None:
        self._found = self._found or what


def _parsed(kind: type, method: str) -> ast.FunctionDef | None:
    """A method that is written in Python, and neither torch's nor Lightning's."""
    for base in kind.__mro__:
        found = base.__dict__.get(method)
        if found is None:
            continue
        if not is_users(base, "abc", "typing"):
            return None
        definition = definition_of(found) if inspect.isfunction(found) else None
        return definition if isinstance(definition, ast.FunctionDef) else None
    return None
