"""Finds hooks that cannot reach weights, by their source: between two steps they let weights stay spread over replicas.

A hook is handed the module and the Trainer, so it could do anything with them. Most count, time and log::

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seconds.append(time.perf_counter() - self.begun)           blind: touches neither
        pl_module.log("epoch", trainer.current_epoch)                   blind: nothing but names in the lists below
        self.norm = pl_module.head.weight.norm()                        sees
        helper(pl_module)                                               sees: who knows what it does

Whatever cannot be read counts as seeing.
"""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from logging import Logger
from pathlib import PurePath
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_megatron.mesh.parts.bytecode import names_in
from lightning_megatron.mesh.parts.packages import LIGHTNING, comes_from, is_users, package_of
from lightning_megatron.mesh.parts.syntax import definition_of
from lightning_megatron.mesh.replaced import Replacement

_KNOWN = ("lightning_utilities", "builtins")
_PLAIN = (bool, int, float, complex, str, bytes, PurePath)
_FACTS = {
    *("global_step", "current_epoch", "global_rank", "local_rank", "is_global_zero", "world_size", "max_epochs", "log"),
    *("max_steps", "num_training_batches", "should_stop", "sanity_checking", "callback_metrics", "logged_metrics"),
    *("log_dict", "progress_bar_metrics", "print", "logger", "loggers", "training", "validating", "testing", "device"),
    *("is_last_batch", "log_dir", "default_root_dir", "accumulate_grad_batches", "num_val_batches"),
}
"""What hooks may ask of a module or Trainer without coming to weights."""
_ACROSS = {("module", "trainer"): "trainer", ("trainer", "lightning_module"): "module"}
_HARMLESS = (types.BuiltinFunctionType, Logger, re.Pattern, torch.dtype, torch.device, TypeVar)
_REACH_ALL = ("gc", "sys", "inspect", "ctypes", "weakref")


def is_blind(callback: Callback) -> bool:
    """Whether no code of a callback can come to weights."""
    kinds = [kind for kind in type(callback).__mro__ if kind is not object]
    own = [kind for kind in kinds if not comes_from(kind, *LIGHTNING)]
    kept = [value for name, value in vars(callback).items() if not _stands_for_own(callback, name, value)]
    if not all(_is_plain(value) for value in (*kept, *(value for kind in own for value in _values(kind)))):
        return False
    functions = [
        (function, _parameters(function, "callback", function.__name__ in dir(Callback)))
        for kind in own
        for function in _functions(kind)
        if function.__name__ != "__init__"  # what it has kept is plain
    ]
    return bool(functions) and all(_reads_facts(f, kinds, callback) and _reaches_none(f) for f, kinds in functions)


def hook_is_blind(module: pl.LightningModule, hook: str) -> bool:
    """Whether a hook of a module cannot come to weights."""
    seen: set[str] = set()
    waiting = [hook]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        function = inspect.getattr_static(type(module), name, None)
        given = vars(module).get(name)
        if not isinstance(function, types.FunctionType) or not (given is None or _stands_for_own(module, name, given)):
            return False
        if not (_reads_facts(function, _parameters(function, "module"), module, waiting) and _reaches_none(function)):
            return False
    return True


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, _PLAIN)


def _stands_for_own(owner: Any, name: str, value: Any) -> bool:
    """Whether an attribute of an object is the module's ``log``, which Lightning puts there, or what this package has
    put in the place of its class's method.
    """
    if name in ("log", "log_dict") and isinstance(owner, Callback):
        return isinstance(value, types.MethodType | Replacement)
    method = getattr(value, "__wrapped__", None)
    return isinstance(value, Replacement) and getattr(method, "__func__", method) is getattr(type(owner), name, value)


def _values(kind: type) -> Iterator[Any]:
    """Attributes of a class other than methods."""
    methods = (types.FunctionType, property, staticmethod, classmethod)
    for name, value in vars(kind).items():
        if not (isinstance(value, methods) or (name.startswith("__") and name.endswith("__")) or name == "_abc_impl"):
            yield value


def _functions(kind: type) -> Iterator[types.FunctionType]:
    for value in vars(kind).values():
        for found in (value.fget, value.fset) if isinstance(value, property) else (value,):
            found = getattr(found, "__func__", found)
            if isinstance(found, types.FunctionType):
                yield found


def _parameters(function: types.FunctionType, owner: str, called: bool = True) -> dict[str, str]:
    """Kinds of a method's arguments, by name; ``any`` for those that may be anything.

    Args:
        function: the method.
        owner: what its first argument is.
        called: whether Lightning calls it; others get what such methods hand on, which are facts.
    """
    code = inspect.unwrap(function).__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    kinds = {name: _kind_of(name, called) for name in names}
    rest = code.co_varnames[len(names) :][: bool(code.co_flags & 4) + bool(code.co_flags & 8)]
    return kinds | dict.fromkeys(rest, "any") | ({names[0]: owner} if names else {})


def _kind_of(name: str, called: bool) -> str:
    if name in ("trainer", "pl_module"):
        return "trainer" if name == "trainer" else "module"
    known = ("batch", "batch_idx", "dataloader_idx", "unused", "stage", "metric", "state_dict")
    return "data" if name in known or not called else "any"


def _reads_facts(
    function: types.FunctionType, kinds: Mapping[str, str], owner: Any, methods: list[str] | None = None
) -> bool:
    """Whether code uses module, Trainer and whatever holds them for facts only.

    Args:
        function: a method.
        kinds: what its arguments are.
        owner: whose method it is.
        methods: gets the names of other methods of a module that are called.
    """
    if inspect.unwrap(function) is not function and is_users(function.__globals__, *_KNOWN):
        return False  # a decorator of the user's gets all arguments
    definition = definition_of(function)
    if not isinstance(definition, ast.FunctionDef):
        return False
    reader = _Reader(kinds, owner, methods)
    for statement in definition.body:
        reader.visit(statement)
    return reader.blind


class _Reader(ast.NodeVisitor):
    """Looks for uses of a module or Trainer other than facts."""

    def __init__(self, kinds: Mapping[str, str], owner: Any, methods: list[str] | None) -> None:
        self._kinds, self._owner, self._methods = kinds, owner, methods
        self.blind = True

    def visit_Name(self, node: ast.Name) -> None:
        """A name by itself: it is handed on, to whoever."""
        self.blind &= self._kinds.get(node.id, "data") == "data" and node.id not in ("super", "__class__")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """An attribute of something; the hidden ones lead anywhere."""
        self.blind &= not node.attr.startswith("__")
        kind = self._kind(node.value)
        if kind is None:
            self.visit(node.value)
        elif (kind, node.attr) in _ACROSS:  # by itself, not for a fact of it
            self.blind = False
        elif kind != "callback":
            self.blind &= node.attr in _FACTS or (kind == "module" and self._own(node))

    def _kind(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            kind = self._kinds.get(node.id)
            return None if kind in ("data", "any") else kind
        if isinstance(node, ast.Attribute) and (kind := self._kind(node.value)) is not None:
            return _ACROSS.get((kind, node.attr))
        return None

    def _own(self, node: ast.Attribute) -> bool:
        """Whether an attribute of a module is a number, text, or a method to be read too."""
        if not isinstance(self._owner, pl.LightningModule):
            return False
        if isinstance(node.ctx, ast.Store):
            return node.attr not in self._owner._modules and node.attr not in self._owner._parameters
        if isinstance(vars(self._owner).get(node.attr), _PLAIN):
            return True
        found = inspect.getattr_static(type(self._owner), node.attr, None)
        if self._methods is None or not isinstance(found, types.FunctionType) or not is_users(found, *_KNOWN):
            return False
        self._methods.append(node.attr)
        return True


def _reaches_none(function: types.FunctionType) -> bool:
    """Whether no global that code names, or that functions and classes it names do, could hold weights."""
    seen: set[types.CodeType] = set()
    waiting = [inspect.unwrap(function)]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, types.FunctionType) or each.__code__ in seen:
            continue
        seen.add(each.__code__)
        names = set(names_in(each.__code__))
        if names & {"gc", "get_objects", "_getframe", "globals", "locals", "vars", "eval", "exec"}:
            return False
        cells = [cell.cell_contents for cell in each.__closure__ or () if _is_filled(cell)]
        for value in [*(each.__globals__[name] for name in names if name in each.__globals__), *cells]:
            if isinstance(value, types.ModuleType):
                if package_of(value) in _REACH_ALL:
                    return False
                waiting += [getattr(value, n) for n in names if _foreign(getattr(value, n, None))]
            elif isinstance(value, type):
                if _foreign(value) and not issubclass(value, nn.Module):
                    waiting += _functions(value)
            elif isinstance(value, types.FunctionType):
                waiting += [value] if _foreign(value) else []
            elif not (_is_plain(value) or isinstance(value, _HARMLESS)):
                return False
    return True


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _foreign(thing: Any) -> bool:
    """Whether a function or class is the user's, as far as it can be told."""
    known = (*_KNOWN, "time", "math", "logging", "typing")
    return isinstance(thing, (types.FunctionType, type)) and is_users(thing, *known)
