"""Containers that a layer's code can write to, and the addresses by which every stage finds its own copy of them.

All stages built the same module, so what one of them finds by going from the module through attributes, entries, hooks
and closures, the others find by the same way::

    self.aux = ...                  ("module", "net.layers.1")
    self.parent.losses.append(...)  ("module", "net") ("attr", "losses")
    REGISTRY.append(...)            ("global", "my_code", "REGISTRY")
    hook: stats[i] = ...            ("module", "net.layers.1") ("hook", "_forward_hooks", 0) ("cell", 1)
    context.seen = ...              ("argument", 1)
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from lightning_megatron.mesh.marks import ATTRIBUTE
from lightning_megatron.mesh.pickling import users_hook

Address = tuple[tuple[Any, ...], ...]
MISSING = object()
"""There is no such entry."""

_BY_THE_CUT = frozenset({"forward", "_call_impl", "named_parameters", "named_buffers", "state_dict", ATTRIBUTE})
MODULE = frozenset(nn.Module().__dict__) | _BY_THE_CUT
"""Attributes of modules that are torch's or this package's."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)
"""What ``torch.nn.modules.module.register_module_forward_hook`` and its like fill."""


@dataclass(frozen=True)
class Container:
    """Something that can be written to.

    Attributes:
        address: how it is found from the root module.
        value: the object.
        names: keys that are looked at; ``None`` for all.
    """

    address: Address
    value: Any
    names: tuple[str, ...] | None = None

    def contents(self) -> dict[Any, Any] | list[Any]:
        """A shallow copy of the content."""
        value = self.value
        if isinstance(value, (list, deque)):
            return list(value)
        if isinstance(value, set):
            return dict.fromkeys(value, True)
        if self.names is not None:
            table = value if isinstance(value, dict) else vars(value)
            return {name: table[name] for name in self.names if name in table}
        if isinstance(value, dict):
            return dict(value)
        if isinstance(value, nn.Module):
            own = {name: entry for name, entry in value.__dict__.items() if name not in MODULE}
            return own | value._buffers if value._buffers else own
        if isinstance(value, types.FunctionType):
            return dict(enumerate(cells_of(value)))
        return attributes_of(value)

    def write(self, key: Any, entry: Any) -> None:
        """Set one entry."""
        value = self.value
        if isinstance(value, types.FunctionType):
            value.__closure__[key].cell_contents = entry  # type: ignore[index]
        elif isinstance(value, (list, deque, dict)):
            value[key] = entry
        elif isinstance(value, set):
            value.add(key)
        elif isinstance(value, nn.Module) and key in value._buffers:
            value._buffers[key] = entry
        elif isinstance(value, nn.Module):
            value.__dict__[key] = entry  # past `nn.Module.__setattr__`, which a hollow module's zeros could trip
        else:
            setattr(value, key, entry)

    def read(self, key: Any) -> Any:
        """One entry, or :data:`MISSING`; for ``None`` a copy of a list."""
        contents = self.contents()
        if isinstance(contents, dict):
            return contents.get(key, MISSING)
        return contents if key is None else contents[key] if key < len(contents) else MISSING

    def change(self, kind: str, key: Any, entry: Any) -> None:
        """Apply a change of this ``kind``; see :class:`.effects.Effect`."""
        value = self.value
        if kind == "set":
            self.write(key, entry)
        elif kind == "drop":
            (vars(value) if hasattr(value, "__dict__") else value).pop(key, None)
        else:
            if kind == "fill":
                value.clear()
            value.extend(entry)

    def put(self, key: Any, entry: Any) -> None:
        """Set one entry, or remove it where ``entry`` is :data:`MISSING`."""
        if entry is not MISSING:
            self.change("set", key, entry)
        elif self.read(key) is not MISSING:
            self.change("drop", key, entry)

    def restore(self, contents: dict[Any, Any] | list[Any]) -> None:
        """Restore the content that :meth:`contents` returned; for objects and closures, only what has changed since."""
        value = self.value
        if isinstance(value, (list, deque)):
            value.clear()
            value.extend(contents)
        elif isinstance(value, (dict, set)) and self.names is None:
            value.clear()
            value.update(contents)
        elif isinstance(contents, dict):
            for key, entry in dict(self.contents()).items():
                if key not in contents and hasattr(value, "__dict__") and not isinstance(value, type):
                    vars(value).pop(key, None)
                elif entry is not contents.get(key):
                    self.write(key, contents[key])


def attributes_of(value: Any) -> dict[str, Any]:
    """Attributes of an object, those in slots among them."""
    slots = [name for kind in type(value).__mro__ for name in _names_of(getattr(kind, "__slots__", ()))]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {name: entry for name, entry in (found | getattr(value, "__dict__", {})).items() if name[:2] != "__"}


def _names_of(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def resolve(root: nn.Module, address: Address, arguments: tuple[Any, ...] = ()) -> Any:
    """The object at ``address`` on this rank.

    Args:
        root: the user's module.
        address: see the module's table.
        arguments: what the layer is called with, by position and then by name.
    """
    value: Any = root
    for kind, *at in address:
        if kind == "module":
            value = root.get_submodule(at[0])
        elif kind == "global":
            value = vars(sys.modules[at[0]])[at[1]]
        elif kind == "globals":
            value = vars(sys.modules[at[0]])
        elif kind == "argument":
            value = arguments[at[0]]
        else:
            value = _STEPS[kind](value, *at)
    return value


_STEPS: dict[str, Callable[..., Any]] = {
    "attr": getattr,
    "item": lambda value, key: value[key],
    "class": lambda value, name: [kind for kind in type(value).__mro__ if kind.__qualname__ == name][-1],
    "method": lambda value, name: function_of(inspect.getattr_static(value, name)),
    "hook": lambda value, table, place: _hook_of(value, table, place),
    "cell": lambda value, place: value.__closure__[place].cell_contents,
    "self": lambda value: value.__self__,
    "context": lambda value: context_of(value),
    "func": lambda value: value.func if isinstance(value, functools.partial) else value.__func__,
    "bound": lambda value, place: value.args[place],
    "default": lambda value, place: value.__defaults__[place],
}


class NoSuchHook(LookupError):
    """An address leads through a hook that is not registered on this rank."""


def hooks_of(module: nn.Module, table: str) -> list[Any]:
    """Hooks of the user and of other libraries; this package's own are not on every rank."""
    hooks = map(users_hook, getattr(module, table).values())
    return [hook for hook in hooks if hook is not None]


def _hook_of(module: nn.Module, table: str, place: int) -> Any:
    hooks = hooks_of(module, table)
    if place >= len(hooks):
        raise NoSuchHook(table)
    return hooks[place]


def context_of(entry: Any) -> Any:
    """The value of a context variable, or of something that wraps one; ``None`` where nothing is set."""
    try:
        return entry.get()
    except LookupError:  # nothing is set
        return None


def function_of(entry: Any) -> Any:
    """The function behind a property, a static method or a class method."""
    if isinstance(entry, property):
        return entry.fget
    return entry.__func__ if isinstance(entry, (staticmethod, classmethod)) else entry


def cells_of(function: types.FunctionType) -> Iterator[Any]:
    """Closure cells of a function."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None
