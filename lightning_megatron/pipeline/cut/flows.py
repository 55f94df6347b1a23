"""Tracks which parts' outputs went into each local variable of the code being read.

``h = self.embed(x)`` before the layers and ``self.head(y + h)`` after them means that the last stage needs the
embedding's output as well as the first. Variables are tracked by name, from assignment to use, through the methods that
the step calls.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

Parts = frozenset[str]
NOTHING: Parts = frozenset()


class Flows:
    """Local variable -> parts whose outputs went into it, for the method being read."""

    def __init__(self) -> None:
        self._values: dict[str, Parts] = {}
        self._collected: list[set[str]] = []

    @contextmanager
    def scope(self, arguments: dict[str, Parts]) -> Iterator[None]:
        """Read another method inside the context, with variables of its own.

        Args:
            arguments: name of an argument -> parts whose outputs went into it.
        """
        outer, self._values = self._values, dict(arguments)
        try:
            yield
        finally:
            self._values = outer

    @contextmanager
    def collecting(self) -> Iterator[set[str]]:
        """Collect the parts that an expression uses, which is read inside the context."""
        found: set[str] = set()
        self._collected.append(found)
        try:
            yield found
        finally:
            self._collected.pop()
            self.touch(found)

    def touch(self, parts: Iterable[str]) -> None:
        """Note that the expression being read uses ``parts``."""
        if self._collected:
            self._collected[-1].update(parts)

    def of(self, name: str) -> Parts:
        """Parts whose outputs went into variable ``name``."""
        return self._values.get(name, NOTHING)

    def bind(self, target: ast.AST, parts: Iterable[str], *, add: bool = False) -> None:
        """Assign to the variables in ``target``.

        Args:
            target: the assignment's target.
            parts: parts whose outputs went into the value.
            add: whether the variables keep their earlier parts too (augmented assignment).
        """
        for name in names_in(target):
            self._values[name] = frozenset(parts) | (self.of(name) if add else NOTHING)

    def forget(self, names: Iterable[str]) -> None:
        """Note that variables hold outputs of layers, which no longer depend on single parts."""
        for name in names:
            self._values.pop(name, None)


def names_in(target: ast.AST) -> set[str]:
    """Names of the variables in an expression or an assignment's target."""
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def results_in(body: Iterable[ast.AST], runs_layer: Callable[[ast.AST], bool]) -> set[str]:
    """Names of the variables that a loop over layers assigns to, but those that it only cuts, or replaces, under a
    condition: ``if number == last: extra = extra[:, -1:]``.

    Args:
        body: of the loop.
        runs_layer: whether a node calls a layer.
    """
    nodes = [node for part in body for node in ast.walk(part)]
    spared = set[int]()
    for node in nodes:
        if isinstance(node, ast.If) and not any(map(runs_layer, (*node.body, *node.orelse))):
            spared.update(id(child) for child in ast.walk(node))
    stored = (node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return {node.id for node in stored if id(node) not in spared}


def is_variable(node: ast.expr) -> bool:
    """Whether an argument is a variable, or an entry of one: ``mask``, ``masks[kind]``, ``*extra``."""
    while isinstance(node, (ast.Subscript, ast.Starred)):
        node = node.value
    return isinstance(node, ast.Name)


def returns(body: Sequence[ast.stmt]) -> bool:
    """Whether the code after these statements is never reached from them: each way through ends in a ``return`` or
    ``raise``. A loop over something may have nothing to loop over.
    """
    last = body[-1] if body else None
    if isinstance(last, ast.If):
        return returns(last.body) and returns(last.orelse)
    if isinstance(last, (ast.With, ast.AsyncWith)):
        return returns(last.body)
    if isinstance(last, ast.Try):
        ends = (returns(last.body) or returns(last.orelse)) and all(returns(each.body) for each in last.handlers)
        return ends or returns(last.finalbody)
    if isinstance(last, ast.Match):
        every = [case for case in last.cases if isinstance(case.pattern, ast.MatchAs) and not case.pattern.pattern]
        meets_all = any(case.guard is None for case in every)
        return meets_all and all(returns(case.body) for case in last.cases)
    if isinstance(last, ast.While):
        forever = isinstance(last.test, ast.Constant) and bool(last.test.value)
        return forever and not any(isinstance(node, ast.Break) for node in ast.walk(last))
    return isinstance(last, (ast.Return, ast.Raise))
