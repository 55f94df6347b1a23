"""Python's and NumPy's global generators: their states, and the lines of the user's code that draw from them.

Nothing of torch's shows such a draw. So the code is read, and while somebody asks, the functions that it names are
replaced by ones that say when they run::

    random.shuffle(order)           np.random.rand()            from random import choice; choice(words)
    ("step.py:12", "random.shuffle")   ("step.py:13", "numpy.random.rand")   ("step.py:14", "random.choice")
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

from lightning_megatron.mesh.parts.bytecode import instructions_of
from lightning_megatron.mesh.replaced import Replacements

Note = Callable[[str, tuple[int, ...]], None]
"""Is told the name of a function, and the shape of what it has drawn."""
ORDERS = frozenset(
    [
        *("random.shuffle", "random.sample", "random.choices"),
        *("numpy.random.shuffle", "numpy.random.permutation", "numpy.random.choice"),
    ]
)
"""Functions that may put the samples of a batch in an order."""
_NO_DRAWS = {"seed", "getstate", "setstate", "get_state", "set_state"}


def states_of_others() -> tuple[Any, Any]:
    """Positions of Python's and NumPy's generators."""
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else (None, [0], 0, 0, 0.0)
    return hash(random.getstate()), (int(numpy[1][0]), *numpy[2:])


def all_of_others() -> dict[str, Any]:
    """States of Python's and NumPy's generators."""
    numpy = {"numpy": sys.modules["numpy"].random.get_state()} if "numpy" in sys.modules else {}
    return {"python": random.getstate(), **numpy}


def set_others(state: Mapping[str, Any]) -> None:
    """Restore states that :func:`all_of_others` returned."""
    random.setstate(state["python"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


class OtherDraws:
    """Finds where some functions draw from Python's and NumPy's generators.

    Args:
        functions: the user's.

    Attributes:
        lines: that mention a function which draws, whether they run or not; and its name.
    """

    def __init__(self, functions: Iterable[FunctionType] = ()) -> None:
        self.lines: set[tuple[str, str]] = set()
        self._bound: set[tuple[str, str]] = set()
        for function in functions:
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
            self._read(function.__code__, function.__globals__, {name: _content(cell) for name, cell in cells})
        for _, name in self.lines:
            self._bound.add(tuple(name.rsplit(".", 1)))  # type: ignore[arg-type]

    @contextmanager
    def noting(self, note: Note) -> Iterator[None]:
        """Tell ``note`` of each draw, by the functions that the lines mention, in what runs inside."""
        with Replacements() as replaced:
            for module, name in self._bound:
                owner = sys.modules.get(module)
                drawing = getattr(owner, name, None)
                if drawing is not None:
                    replaced.put(owner, name, _said(drawing, note))
            yield

    def _read(self, code: CodeType, names: Mapping[str, Any], inner: Mapping[str, Any]) -> None:
        local, value = dict(inner), None
        imported: Any = None
        constant: Any = None
        for step in instructions_of(code):
            before: Any = value
            value = None
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = names.get(step.argval)
                if _full_name(value):
                    self._bound.add((str(names.get("__name__")), step.argval))
            elif step.opname in ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF"):
                value = local.get(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                value = getattr(before, step.argval, None) if isinstance(before, ModuleType) else None
            elif step.opname == "IMPORT_NAME":
                imported = value = sys.modules.get(step.argval if constant else step.argval.split(".")[0])
            elif step.opname == "IMPORT_FROM":
                value = getattr(imported, step.argval, None)
            elif step.opname in ("STORE_FAST", "STORE_DEREF"):
                local[step.argval] = before
            elif step.opname in ("EXTENDED_ARG", "PUSH_NULL", "CACHE", "SWAP", "POP_TOP"):
                value = before
            elif step.opname == "LOAD_CONST":
                constant = step.argval  # in front of an import: the names that are taken from the module
            at = None if step.positions is None else step.positions.lineno
            if at is not None and step.opname.startswith("LOAD_") and (name := _full_name(value)):
                self.lines.add((f"{code.co_filename}:{at}", name))
        for inside in code.co_consts:
            if isinstance(inside, CodeType):
                self._read(inside, names, local)


def _said(drawing: Callable[..., Any], note: Note) -> Callable[..., Any]:
    name = _full_name(drawing) or str(getattr(drawing, "__name__", drawing))

    @functools.wraps(drawing)
    def call(*args: Any, **kwargs: Any) -> Any:
        drawn = drawing(*args, **kwargs)
        note(name, _shape(args[0] if drawn is None and args else drawn))
        return drawn

    return call


def _full_name(value: Any) -> str:
    """Module and name of a function that draws from a global generator; "" for anything else."""
    owner, name = getattr(value, "__self__", None), str(getattr(value, "__name__", ""))
    if owner is None or isinstance(owner, ModuleType | type) or name in _NO_DRAWS:
        return ""
    if owner is getattr(random.random, "__self__", None):
        return f"random.{name}"
    numpy = sys.modules.get("numpy.random")
    return f"numpy.random.{name}" if numpy is not None and owner is getattr(numpy.rand, "__self__", None) else ""


def _shape(drawn: Any) -> tuple[int, ...]:
    if isinstance(drawn, list | tuple):
        return (len(drawn),)
    return tuple(getattr(drawn, "shape", ()))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a name that has no value yet
        return None
