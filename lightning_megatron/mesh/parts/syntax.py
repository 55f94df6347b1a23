"""The source of a method as a syntax tree, read once: a file's lines are taken apart token by token to find its end."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import Any


def definition_of(method: Callable[..., Any]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The ``def`` of a function or method, not to be changed; None where there is no source, and for a ``lambda``."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return None if code is None else definition_in(code)


@functools.lru_cache(maxsize=4096)
def definition_in(code: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The same, of the code of a function."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return definition if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) else None


def place_in(code: CodeType, line: int) -> str:
    """File and line of a line of :func:`definition_in`, which counts from 1."""
    return f"{code.co_filename}:{code.co_firstlineno + line - 1}"
