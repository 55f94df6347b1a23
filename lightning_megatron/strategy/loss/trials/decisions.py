"""Decisions in a step's code, read from its source: what a condition may change, and whether a number is compared.

A condition on a number of the batch may choose what the loss is, or what the step keeps, or only stop the run::

    loss = loss if loss > 3 else 0.5 * loss                 a choice
    if loss > self.worst: self.worst = loss                 a decision about what is kept
    if loss > 1e4: raise ValueError(...)                    neither
    torch.stack([a for a, b in pairs if b < 4]).mean()      a filter: how many remain counts

A number that ``float`` takes out of a tensor is followed by its name, through the function that takes it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Literal

from lightning_megatron.mesh.parts.packages import is_library
from lightning_megatron.mesh.parts.syntax import definition_in

Decided = Literal["", "decision", "choice", "filter"]
"""Nothing; something that may be about what the step keeps; something that goes into what it returns; which turns of a
loop count.
"""

_SAYS = frozenset({"print", "warn", "debug", "info", "warning", "error", "log", "log_dict"})
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_INNER = ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>")
_COLLECT = ("append", "extend", "add")
_TRAINED = frozenset({"requires_grad", "requires_grad_", "freeze", "unfreeze", "eval", "train"})


def decided_at(frame: FrameType) -> Decided:
    """Tell what the condition at the line of a frame may change; in a library's code, as a metric's or that of
    ``generate``, nothing.

    Args:
        frame: where a number is compared, or asked for its truth.
    """
    if is_library(frame):
        return ""
    function = frame.f_back if frame.f_code.co_name in _INNER and frame.f_back is not None else frame
    return _decided(function.f_code, frame.f_lineno)


def decided_later(frame: FrameType, beside: tuple[int, ...] | None) -> Decided:
    """Tell what a number may change that the line of a frame takes out of a tensor, by ``float`` or the like.

    Args:
        frame: where it is taken.
        beside: numbers with which it may be compared; ``None`` for a count, which matters wherever it is used, and not
            in comparisons alone.
    """
    return "" if is_library(frame) else _used(frame.f_code, frame.f_lineno, beside)


@functools.lru_cache(maxsize=1024)
def _decided(code: CodeType, line: int) -> Decided:
    definition = definition_in(code)
    if definition is None:
        return "decision"
    line -= code.co_firstlineno - 1
    statement = _statement_at(definition, line)
    if statement is None:
        return "decision"
    return "filter" if _filters(definition, statement, line) else _changed_by(statement)


def _filters(definition: ast.AST, statement: ast.stmt, line: int) -> bool:
    """Whether a condition says which turns of a loop count."""
    parts = [part for head in _heads(statement) for part in ast.walk(head)]
    conditions = (condition for part in parts if isinstance(part, ast.comprehension) for condition in part.ifs)
    if any(condition.lineno <= line <= (condition.end_lineno or line) for condition in conditions):
        return True
    loops = (part for part in ast.walk(definition) if isinstance(part, (ast.For, ast.AsyncFor)))
    if not isinstance(statement, ast.If) or not any(statement in ast.walk(loop) for loop in loops):
        return False
    inside = [part for each in (*statement.body, *statement.orelse) for part in ast.walk(each)]
    calls = (part.func for part in inside if isinstance(part, ast.Call))
    collects = any(getattr(called, "attr", "") in _COLLECT for called in calls)
    return collects or any(isinstance(part, (ast.Continue, ast.Break, ast.AugAssign)) for part in inside)


@functools.lru_cache(maxsize=1024)
def _used(code: CodeType, line: int, beside: tuple[int, ...] | None) -> Decided:
    definition = definition_in(code)
    statement = None if definition is None else _statement_at(definition, line - code.co_firstlineno + 1)
    if definition is None or statement is None:
        return ""
    names = _names_set_by(statement)
    users = [each for each in _statements(definition) if each is not statement and names & _names_in(_heads(each))]
    if beside is None:
        found = users if names else [statement]
    elif not beside:
        found = [each for each in (statement, *users) if any(map(_compares, _heads(each)))]
    else:
        found = [each for each in (statement, *users) if any(_compares_whole(h, names, beside) for h in _heads(each))]
    kinds = map(_changed_by, found)
    return max(kinds, key=["", "decision", "choice"].index, default="")


def _statement_at(definition: ast.AST, line: int) -> ast.stmt | None:
    """The innermost statement whose own code, without the statements in it, has a line; before others a condition."""
    found = []
    for statement in _statements(definition):
        spans = ((head.lineno, head.end_lineno or head.lineno) for head in _heads(statement))
        if any(first <= line <= last for first, last in spans):
            found.append(statement)
    conditions = (each for each in found if isinstance(each, (ast.If, ast.While, ast.Assert)))
    return next(conditions, found[-1] if found else None)


def _statements(definition: ast.AST) -> Iterator[ast.stmt]:
    return (node for node in ast.walk(definition) if isinstance(node, ast.stmt) and node is not definition)


def _heads(statement: ast.stmt) -> list[ast.expr]:
    """Expressions of a statement, without those of the statements in it."""
    return [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr)]


def _changed_by(statement: ast.stmt) -> Decided:
    if isinstance(statement, ast.Assert) or _only_says(statement):
        return ""
    if _TRAINED & _names_in([statement]):
        return "choice"  # of what is trained, which nobody keeps
    if isinstance(statement, (ast.If, ast.While)):
        inside = [*statement.body, *statement.orelse]
        if not statement.orelse and all(map(_ends_or_says, inside)):
            return ""
        return "choice" if any(map(_goes_on, inside)) else "decision"
    return "choice" if _goes_on(statement) else "decision"


def _goes_on(statement: ast.stmt) -> bool:
    """Whether it sets a variable, or returns something."""
    parts = [part for part in ast.walk(statement) if isinstance(part, ast.stmt)]
    sets = any(isinstance(target, ast.Name) for part in parts for target in _targets(part))
    return sets or any(isinstance(part, ast.Return) and not _is_none(part.value) for part in parts)


def _targets(statement: ast.stmt) -> Iterable[ast.expr]:
    found = getattr(statement, "targets", [getattr(statement, "target", None)])
    return [part for target in found if target is not None for part in getattr(target, "elts", [target])]


def _names_set_by(statement: ast.stmt) -> set[str]:
    return {getattr(target, "id", getattr(target, "attr", "")) for target in _targets(statement)} - {""}


def _names_in(heads: Iterable[ast.AST]) -> set[str]:
    nodes = (node for head in heads for node in ast.walk(head))
    return {getattr(node, "id", getattr(node, "attr", "")) for node in nodes} - {""}


def _compares(node: ast.AST) -> bool:
    """Whether an expression compares numbers by size."""
    for part in ast.walk(node):
        if isinstance(part, ast.Compare) and any(isinstance(op, _ORDERS) for op in part.ops):
            return True
        if isinstance(part, ast.Call) and getattr(part.func, "id", "") in ("min", "max"):
            return True
    return False


def _compares_whole(node: ast.AST, names: set[str], beside: tuple[int, ...]) -> bool:
    """Whether an expression compares a whole number itself by size, and not what is made of as many entries.

    ::

        if int(n.sum()) > 50                        compares it
        torch.arange(int(n.max())) < n[:, None]     does not

    Args:
        node: of the source.
        names: that hold the number.
        beside: what it may be compared with.
    """
    for part in ast.walk(node):
        if isinstance(part, ast.Compare) and any(isinstance(op, _ORDERS) for op in part.ops):
            sides = [part.left, *part.comparators]
        elif isinstance(part, ast.Call) and getattr(part.func, "id", "") in ("min", "max"):
            sides = part.args
        else:
            continue
        allowed = any(isinstance(side, ast.Constant) and side.value in beside for side in sides)
        if not allowed and any(_is_number(side, names) for side in sides):
            return True
    return False


def _is_number(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is a whole number that was taken out of a tensor, or computed of one."""
    if isinstance(node, ast.BinOp):
        return _is_number(node.left, names) or _is_number(node.right, names)
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "") == "int"
    return getattr(node, "id", getattr(node, "attr", None)) in names


def _ends_or_says(statement: ast.stmt) -> bool:
    ends = isinstance(statement, ast.Return) and _is_none(statement.value)
    return ends or isinstance(statement, (ast.Raise, ast.Pass)) or _only_says(statement)


def _only_says(statement: ast.stmt) -> bool:
    called: Callable[..., object] | ast.AST | None = None
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
    return getattr(called, "attr", getattr(called, "id", "")) in _SAYS


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)
