"""Finds what a layer's code can write to besides its output: attributes, lists, dictionaries, globals, closure cells.

A layer keeps its auxiliary loss on itself, appends it to a list of the model or of a Python module, puts a number into
a dictionary that a hook closes over, or into an object it was given. :class:`Reach` finds all of these by going through
what the layer's module refers to and its code mentions; each is a container with an address (:mod:`.containers`).

Code of libraries is not read: their modules' attributes are looked at, and the closures and context variables of their
hooks, by which Hugging Face models collect hidden states and attention weights; their other globals are not.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import UserDict, deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from lightning_megatron.mesh.parts.bytecode import instructions_of, stored_by
from lightning_megatron.mesh.parts.packages import is_library, module_of
from lightning_megatron.pipeline.elsewhere.containers import (
    HOOKS,
    MODULE,
    Address,
    Container,
    attributes_of,
    cells_of,
    context_of,
    function_of,
    hooks_of,
)

_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"})
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
LONG = 10_000
"""Entries of a container that is looked at in every step."""
LONGEST = 200_000
"""Entries of a container that is looked at in trials: losses of all steps so far, a number for each sample."""
_OPENED = 64  # entries of a container that are containers themselves and looked into
_FOUND = 500  # containers of one layer; data that happens to hang on the module is none of its business
_DEPTH = 6
_READ = 5_000  # containers, where all code of a module is read


class Reach:
    """Finds the containers that one layer's code can write to.

    Args:
        root: the user's module.
        layer: a layer of its trunk.
        others: the trunk's other layers, whose own attributes are none of this layer's business.
        most: containers to find; more are data that happens to hang on the module.
        longest: entries of one of them.

    Attributes:
        passing: whether what was found last holds for one call only.
        functions: of the user's, that were read for it.
        applies: whether ``apply`` of an ``autograd.Function`` was among what was found.
    """

    def __init__(
        self, root: nn.Module, layer: nn.Module, others: frozenset[int], most: int = _FOUND, longest: int = LONG
    ) -> None:
        self._names = {id(module): name for name, module in root.named_modules()}
        self._layer, self._others = layer, others
        self._inside = frozenset(id(module) for module in layer.modules())
        self._root, self._most, self._longest = root, most, longest

    def containers(self, arguments: tuple[Any, ...] = ()) -> list[Container]:
        """All of them, those inside the layer first.

        Args:
            arguments: what the layer is called with, by position and then by name.
        """
        self._found: dict[int, Container] = {}
        self.functions: list[types.FunctionType] = []
        self._called: dict[int, set[str]] = {}
        self.applies = False
        self._seen: dict[int, Any] = {}
        self.passing = bool(arguments)
        for module in self._layer.modules():
            self._visit(module, (), _DEPTH)
        for place, argument in enumerate(arguments):
            if not isinstance(argument, (Tensor, *_PLAIN)):
                self._visit(argument, (("argument", place),), _DEPTH)
        self._visit(self._root, (), _DEPTH)
        return list(self._found.values())

    def also(self, value: Any, address: Address) -> list[Container]:
        """Further containers, of what code reaches another way.

        Args:
            value: that holds them.
            address: of it.
        """
        known = set(self._found)
        self._visit(value, address, _DEPTH)
        return [container for key, container in self._found.items() if key not in known]

    def names_of(self, function: types.FunctionType) -> set[str]:
        """Names by which code may call a function of :attr:`functions`: ``loss`` where a class has ``loss = focal``."""
        return self._called[id(function)]

    def _visit(self, value: Any, address: Address, depth: int) -> None:
        kind = type(value)
        if kind is types.FunctionType and depth:
            self._called.setdefault(id(value), {value.__name__}).update(_name_in(address))
        if (
            depth == 0
            or len(self._found) > self._most
            or kind in _PLAIN
            or isinstance(value, Tensor)
            or id(value) in self._seen
        ):
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._visit_module(value, address, depth)
        elif isinstance(value, (list, deque, dict, set)):
            self._visit_container(value, address, depth)
        elif kind is tuple:
            self._visit_entries(enumerate(value), "item", address, depth)
        elif isinstance(value, UserDict):
            self._visit(value.data, (*address, ("attr", "data")), depth)
        elif isinstance(value, types.BuiltinMethodType):
            self._visit(value.__self__, (*address, ("self",)), depth)
        elif isinstance(value, _FUNCTIONS):
            self._visit_function(value, address, depth)
        elif not isinstance(value, (type, types.ModuleType)) and _holds_attributes(value) and _is_followed(kind):
            self._found[id(value)] = Container(address, value)
            self._visit_entries(list(attributes_of(value).items()), "attr", address, depth)
            self._visit_class(kind, address, depth)

    def _visit_container(self, value: Any, address: Address, depth: int) -> None:
        if len(value) > self._longest:
            return
        self._found[id(value)] = Container(address, value)
        if len(value) > _OPENED:
            return
        if isinstance(value, dict):
            self._visit_entries(list(value.items()), "item", address, depth)
        elif not isinstance(value, set):
            self._visit_entries(enumerate(list(value)), "item", address, depth)

    def _visit_entries(self, entries: Any, step: str, address: Address, depth: int) -> None:
        for key, entry in entries:
            if isinstance(key, (str, int, tuple)) and not (step == "attr" and str(key).startswith("__")):
                self._visit(entry, (*address, (step, key)), depth - 1)

    def _visit_module(self, module: nn.Module, address: Address, depth: int) -> None:
        if id(module) in self._others and id(module) not in self._inside:
            return
        if id(module) in self._names:
            address = (("module", self._names[id(module)]),)
        self._found[id(module)] = Container(address, module)
        attributes = [(name, value) for name, value in module.__dict__.items() if name not in MODULE]
        self._visit_entries(attributes, "attr", address, depth)
        for table in HOOKS:
            for place, hook in enumerate(hooks_of(module, table)):
                self._visit(hook, (*address, ("hook", table, place)), depth - 1)
        if id(module) in self._inside:
            self._visit_class(type(module), address, depth)

    def _visit_class(self, kind: type, address: Address, depth: int) -> None:
        for base in kind.__mro__:
            if is_library(base) or base.__name__ == "_Elsewhere" or id(base) in self._seen:
                continue
            self._seen[id(base)] = base
            names = tuple(name for name, entry in vars(base).items() if _is_data(entry) and name[:2] != "__")
            self._found[id(base)] = Container((*address, ("class", base.__qualname__)), base, names)
            for name, entry in list(vars(base).items()):
                function = function_of(entry)
                if isinstance(function, types.FunctionType) and name != "__init__":
                    self._visit(function, (*address, ("method", name)), depth - 1)
                elif _is_data(entry):
                    self._visit(entry, (*address, ("attr", name)), depth - 1)

    def _visit_function(self, value: Any, address: Address, depth: int) -> None:
        if isinstance(value, types.MethodType):
            self.applies |= isinstance(value.__self__, type) and issubclass(value.__self__, Function)
            self._visit(value.__self__, (*address, ("self",)), depth)
            self._visit(value.__func__, (*address, ("func",)), depth)
        elif isinstance(value, functools.partial):
            self._visit(value.func, (*address, ("func",)), depth)
            self._visit_entries(enumerate(value.args), "bound", address, depth)
        else:
            if not is_library(value):
                self.functions.append(value)
                if value.__dict__:
                    self._visit(value.__dict__, (*address, ("attr", "__dict__")), depth)
            if value.__closure__:
                self._found[id(value)] = Container(address, value)
                self._visit_entries(enumerate(cells_of(value)), "cell", address, depth)
            self._visit_entries(enumerate(value.__defaults__ or ()), "default", address, depth)
            self._visit_globals(value, depth)

    def _visit_globals(self, function: types.FunctionType, depth: int) -> None:
        names, stored = names_in(function.__code__)
        module = module_of(function)
        if sys.modules.get(module) is None or vars(sys.modules[module]) is not function.__globals__:
            return
        if stored and not is_library(function):
            self._found[id(function.__code__)] = Container((("globals", module),), function.__globals__, stored)
        for name in names:
            entry = function.__globals__.get(name)
            if _holds_context(entry):
                self.passing = True
                self._visit(context_of(entry), (("global", module, name), ("context",)), depth - 1)
            elif is_library(function):
                continue
            elif isinstance(entry, types.ModuleType) and not is_library(entry):
                for other in names:
                    if other in vars(entry):
                        self._visit(vars(entry)[other], (("global", entry.__name__, other),), depth - 1)
            elif isinstance(entry, type) and not is_library(entry):
                self._visit_named_class(entry, module, name, depth)
            elif entry is not None:
                self._visit(entry, (("global", module, name),), depth - 1)

    def _visit_named_class(self, kind: type, module: str, name: str, depth: int) -> None:
        if issubclass(kind, nn.Module) or id(kind) in self._seen:
            return
        self._seen[id(kind)] = kind
        data = {key: entry for key, entry in vars(kind).items() if _is_data(entry) and key[:2] != "__"}
        address: Address = (("global", module, name),)
        self._found[id(kind)] = Container(address, kind, tuple(data))
        self._visit_entries(data.items(), "attr", address, depth)


_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NAMES = ("attr", "method", "global")
_WITHIN = ("cell", "default", "bound", "func", "item", "self")  # of what has a name


def _name_in(address: Address) -> list[str]:
    """The name under which code reaches what has an address, or what it is in."""
    named = (step for step in reversed(address) if step[0] not in _WITHIN and not str(step[-1]).startswith("__"))
    step = next(named, None)  # an object is called by its own name: `__call__`
    return [str(step[-1])] if step is not None and step[0] in _NAMES else []


def _holds_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") or any("__slots__" in vars(kind) for kind in type(value).__mro__)


def _is_followed(kind: type) -> bool:
    return kind is types.SimpleNamespace or not is_library(kind)


def _holds_context(entry: Any) -> bool:
    """Whether it is a context variable, or wraps one as Hugging Face does for ``torch.compile``."""
    if isinstance(entry, ContextVar):
        return True
    wraps = not isinstance(entry, (type, types.ModuleType)) and callable(getattr(entry, "get", None))
    return wraps and any(isinstance(value, ContextVar) for value in getattr(entry, "__dict__", {}).values())


def _is_data(entry: Any) -> bool:
    return isinstance(entry, (*_PLAIN, list, dict, set, deque, Tensor)) or (
        not isinstance(entry, (type, types.ModuleType, *_FUNCTIONS, property, staticmethod, classmethod))
        and not is_library(type(entry))
    )


def functions_of_step(module: nn.Module, *steps: str) -> list[types.FunctionType]:
    """The functions of the user's that a step may call, by their names, hooks of modules and itself among them.

    Args:
        module: the user's.
        steps: names of the step, or of several; by default the training step.
    """
    reach = Reach(module, module, frozenset(), _READ)
    reach.containers()
    hooks = (hook for child in module.modules() for table in HOOKS for hook in hooks_of(child, table))
    mentioned = {*(steps or ("training_step",)), "forward"}
    waiting, found = list(reach.functions), list[types.FunctionType]()
    plain = (hook.func if isinstance(hook, functools.partial) else hook for hook in hooks)
    mentioned.update(getattr(function_of(hook), "__name__", "__call__") for hook in plain)
    while called := [function for function in waiting if reach.names_of(function) & mentioned]:
        waiting = [function for function in waiting if not reach.names_of(function) & mentioned]
        found += called
        mentioned.update(name for function in called for name in names_in(function.__code__)[0])
    return found


def attributes_set_by(module: nn.Module) -> set[str]:
    """Attributes that functions of the user's set which steps and hooks may call, of whatever object.

    Args:
        module: the user's.
    """
    reach = Reach(module, module, frozenset(), _READ)
    reach.containers()
    return {name for function in reach.functions for name in attributes_set_in(function.__code__)}


@functools.cache
def attributes_set_in(code: types.CodeType) -> frozenset[str]:
    """Attributes that code sets, of whatever object."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(stored_by(code, "STORE_ATTR")).union(*map(attributes_set_in, inner))


@functools.cache
def names_in(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Global names, and attributes of them, that code mentions; and the global names that it assigns."""
    stored = [*stored_by(code, "STORE_GLOBAL")]
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, assigned = names_in(constant)
            names += inner
            stored += assigned
    return tuple(dict.fromkeys(names)), tuple(dict.fromkeys(stored))


def may_read(unit: nn.Module, key: Any, in_table: bool = False) -> bool:
    """Whether code of a layer, or of its hooks, reads an attribute, a global or an entry called ``key``.

    Args:
        unit: the layer.
        key: a name, or what a table has for keys.
        in_table: whether it is the entry of a dictionary or a list, whose key need not stand in the code.
    """
    return any(_loads(code, key) or (in_table and _adds_to_entries(code)) for code in _codes(unit))


def _adds_to_entries(code: types.CodeType) -> bool:
    steps = instructions_of(code)
    adds = any(step.opname.startswith("INPLACE_") or step.argrepr[-1:] == "=" != step.argrepr[-2:-1] for step in steps)
    return adds and {"BINARY_SUBSCR", "STORE_SUBSCR"} <= {step.opname for step in steps}


def _codes(unit: nn.Module) -> Iterator[types.CodeType]:
    for module in unit.modules():
        entries = [entry for table in HOOKS for entry in (*hooks_of(module, table), *getattr(module, table).values())]
        for base in type(module).__mro__:
            entries += [] if is_library(base) else list(vars(base).values())
        entries = [entry.func if isinstance(entry, functools.partial) else entry for entry in entries]
        functions = [function_of(getattr(entry, "__func__", entry)) for entry in entries]
        yield from (function.__code__ for function in functions if isinstance(function, types.FunctionType))


def _loads(code: types.CodeType, key: Any) -> bool:
    steps = instructions_of(code)
    if code.co_name == "__init__":
        return False
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if isinstance(step.argval, types.CodeType):
            if _loads(step.argval, key):
                return True
        elif isinstance(key, str) and step.argval == key:
            only_set = following is not None and following.opname == "STORE_SUBSCR"
            if step.opname in _LOADS or (step.opname == "LOAD_CONST" and not only_set):
                return True
    return False
