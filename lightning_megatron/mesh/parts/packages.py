"""Packages that code comes from: torch's, Lightning's, this one, Python's own, others', or the user's.

Many places treat the user's code unlike that of libraries: they read it, follow it or name its line. All of them ask
here, by the Python module in which something was defined::

    module_of(nn.Linear)                     "torch.nn.modules.linear"
    package_of(nn.Linear)                    "torch"
    comes_from(nn.Linear, "torch.nn")        True
    is_users(nn.Linear)                      False
    is_users(counts, "builtins")             whether ``counts`` is a class of the user's, and not ``int`` or ``dict``

What says nothing of where it comes from is taken for the user's.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

PACKAGE = "lightning_megatron"
LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
"""Not ``lightning_utilities``, whose functions wrap the user's."""
FRAMEWORKS = ("torch", *LIGHTNING)
"""Packages that any module of the user's is built on."""
METRICS = "torchmetrics"
HUGGING_FACE = ("transformers", "peft", "tokenizers")
STANDARD = frozenset(sys.stdlib_module_names) - {"__main__"}
"""Python's own, ``builtins`` among them."""

_NOT_USERS = frozenset((*FRAMEWORKS, PACKAGE))
_LIBRARIES = (
    _NOT_USERS | STANDARD | {METRICS, *HUGGING_FACE, "torchvision", "torchaudio", "lightning_utilities", "numpy"}
)


def module_of(thing: Any) -> str:
    """Dotted name of the Python module that something was defined in; empty if it cannot be told.

    Args:
        thing: a class, function, method, frame, Python module or the globals of one, or an object of any class. A
            function that stands around another one and says so (``functools.wraps``) counts as that one, and a
            ``functools.partial`` as Python's.
    """
    name = getattr(thing, "__module__", None)
    if isinstance(name, str):  # of most things
        return name
    if isinstance(thing, types.FrameType):
        thing = thing.f_globals
    if isinstance(thing, dict):
        name = thing.get("__name__")
    elif isinstance(thing, types.ModuleType):
        name = thing.__name__
    return name if isinstance(name, str) else ""


def package_of(thing: Any) -> str:
    """First part of :func:`module_of`: the package that is installed."""
    return module_of(thing).split(".", 1)[0]


def comes_from(thing: Any, *names: str) -> bool:
    """Whether something was defined in one of these packages or Python modules, or inside of one.

    Args:
        thing: as for :func:`module_of`.
        names: dotted, ``"torch"`` or ``"torch.nn.modules"``.
    """
    home = module_of(thing)
    return home in names or home.startswith(_inside(names))


@functools.cache
def _inside(names: tuple[str, ...]) -> tuple[str, ...]:
    """How the names of their parts begin."""
    return tuple(f"{name}." for name in names)


def is_users(thing: Any, *libraries: str) -> bool:
    """Whether code is the user's: neither torch's, Lightning's or this package's, nor of further packages.

    Args:
        thing: as for :func:`module_of`.
        libraries: packages whose code is none of the user's either, ``"builtins"`` among them.
    """
    package = package_of(thing)
    return package not in _NOT_USERS and package not in libraries


def runs_for_users(frame: types.FrameType, libraries: tuple[str, ...] = ()) -> bool:
    """The same of a frame, as many are asked one after the other: by its module's name, once for each name."""
    return _is_users_module(frame.f_globals.get("__name__"), libraries)


@functools.lru_cache(maxsize=4096)
def _is_users_module(name: Any, libraries: tuple[str, ...]) -> bool:
    return is_users({"__name__": name}, *libraries)


def is_library(thing: Any) -> bool:
    """Whether something is Python's own, or of a library that is known not to hold what user code keeps."""
    return package_of(thing) in _LIBRARIES
