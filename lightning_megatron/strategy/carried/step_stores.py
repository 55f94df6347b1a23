"""Attributes that the code of a step stores to, whatever the batch: a trial may not see that they change.

Nothing is added to a count of right answers by a batch without any. So that a step is not taken for one that does not
write it, its code is read::

    self.right += (p == y).sum()           stored to in each step
    self.bank.index_add_(0, y, z)          likewise
    if loss < self.best: self.best = loss  in some steps only: a trial sees it, or does not
    if hard.sum() > 9: self.hits += 1      if many samples are: those of a part may never be as many
    if hard.any(): self.kept.append(e)     by batches with such samples: how those of its parts come together, has to
                                           be seen where all of them do so, and where some do
    self.began = time.perf_counter()       of no batch: each process has its own time
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_megatron.mesh.parts.names import leaf_of
from lightning_megatron.mesh.parts.syntax import definition_of, place_in
from lightning_megatron.pipeline.elsewhere.undo import LISTS
from lightning_megatron.strategy.loss.tables import Name

_GROW = frozenset(("append", "appendleft", "extend", "insert", "add", "update"))
_ADD = frozenset(("append", "extend", "update", "add", "add_", "sub_", "mul_", "div_", "lerp_", "copy_", "index_add_"))
_COUNTS = frozenset(
    ("sum", "len", "count_nonzero", "numel", "bincount", "unique", "nonzero", "std", "var", "norm", "histc")
)
_SAME = frozenset(("detach", "clone", "item", "float", "double", "to"))
CLOCKS = frozenset(
    f"{name}{unit}" for name in ("time", "perf_counter", "monotonic", "process_time") for unit in ("", "_ns")
) | {"default_timer", "now", "utcnow", "elapsed_time"}


def stored_names(functions: Iterable[types.FunctionType]) -> set[str]:
    """Attributes that functions store to, but for what is behind a condition.

    Args:
        functions: that a step calls.
    """
    return {name for function in functions for name in _stored(function)}


def names_of_clocks(functions: Iterable[types.FunctionType]) -> set[str]:
    """Attributes that functions set to what they have read off a clock.

    Args:
        functions: likewise.
    """
    return {name for function in functions for name in _of_clocks(function)}


def is_plainly_written(functions: Iterable[types.FunctionType], name: str) -> bool:
    """Whether functions write an attribute in each step alike, as sums and means are written: a number times what it
    was, and something of the batch. So is not a largest value (``max(self.best, loss)``), though a first one, which is
    larger than what was there, looks like a mean.

    Args:
        functions: that a step calls.
        name: of the attribute.
    """
    found = [each for function in functions for each in _writes(function, name)]
    return bool(found) and all(found)


def stored_behind_counts(functions: Iterable[types.FunctionType]) -> set[str]:
    """Attributes that functions store to behind a condition on how many samples of a batch there are of a kind, or on
    how far they are apart, which the parts of a batch may never meet, and the whole may.

    Args:
        functions: that a step calls.
    """
    return {name for function in functions for name in _behind_counts(function)}


def stored_behind_content(functions: Iterable[types.FunctionType], *, loops: bool = True) -> set[str]:
    """Attributes that functions store to behind a condition, or in a loop, on what they are given: on a batch. What is
    on a module, such as a number of steps, is the same for all parts of a batch.

    Args:
        functions: that a step calls.
        loops: whether those in loops count, which go over samples, or kinds of them.
    """
    return {name for function in functions for name in _behind_content(function, loops)}


def defaults_of(module: nn.Module, stored: set[str]) -> dict[Name, Any]:
    """Numbers that modules have from their class, until a step stores to them.

    Args:
        module: the user's.
        stored: names under which code stores.
    """
    found = {(path, key): getattr(type(child), key, None) for path, child in module.named_modules() for key in stored}
    return {name: value for name, value in found.items() if isinstance(value, (int, float, complex))}


def is_stored(name: Name, value: Any, stored: set[str]) -> bool:
    """Whether a value is a number, tensor or list that is stored under one of some names.

    Args:
        name: of the value.
        value: it.
        stored: the names.
    """
    if isinstance(value, LISTS):  # whose table is theirs
        return name[1] is None and leaf_of(name[0]) in stored
    return name[1] in stored and isinstance(value, (int, float, complex, Tensor)) and not isinstance(value, bool)


def line_of_store(functions: Iterable[types.FunctionType], name: str) -> str:
    """The line of some functions that stores to an attribute; "" where none is found.

    Args:
        functions: that a step calls.
        name: of the attribute.
    """
    for function in functions:
        definition, code = definition_of(function), function.__code__
        for node in ast.walk(definition) if definition is not None else ():
            if isinstance(node, ast.stmt) and name in _stored_by(node):
                return place_in(code, node.lineno)
    return ""


def _writes(function: types.FunctionType, name: str) -> Iterator[bool]:
    """Of each line that writes an attribute, whether it does so plainly."""
    definition = definition_of(function)
    if definition is None:
        yield from (False for each in function.__code__.co_names if each == name)
        return
    always = {id(line) for line in _lines(definition.body)}
    lines = [node for node in ast.walk(definition) if isinstance(node, ast.stmt) and name in _stored_by(node)]
    if not lines:
        return
    held = set[str]()
    assigned = [each for each in ast.walk(definition) if isinstance(each, (ast.Assign, ast.AnnAssign, ast.NamedExpr))]
    for each in (*assigned, *assigned):  # twice: a name may be given another name above
        if each.value is not None and _uses(each.value, name, held):
            stored = (node for node in ast.walk(each) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
            held.update(node.id for node in stored)
    yield from (id(line) in always and _is_plain(line, name, lambda value: _uses(value, name, held)) for line in lines)


def _uses(value: ast.expr, name: str, held: set[str]) -> bool:
    """Whether an expression has an attribute in it, or a local name of something made of it."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id in held)
        for node in ast.walk(value)
    )


def _is_plain(line: ast.stmt, name: str, uses: Callable[[ast.expr], bool]) -> bool:
    if isinstance(line, ast.AugAssign):
        direct = isinstance(line.target, ast.Attribute) and line.target.attr == name
        return direct and isinstance(line.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)) and not uses(line.value)
    if isinstance(line, ast.Assign):
        direct = len(line.targets) == 1 and isinstance(line.targets[0], ast.Attribute) and line.targets[0].attr == name
        return direct and _is_affine(line.value, name, uses)
    return isinstance(line, ast.Expr) and _adds(line.value, name, uses)


def _adds(called: ast.expr, name: str, uses: Callable[[ast.expr], bool]) -> bool:
    """Whether calls in a chain add to an attribute: ``self.sums.mul_(0.9).add_(new)``."""
    if isinstance(called, ast.Attribute):
        return called.attr == name
    if not isinstance(called, ast.Call) or not isinstance(called.func, ast.Attribute) or called.func.attr not in _ADD:
        return False
    given = (*called.args, *(keyword.value for keyword in called.keywords))
    copies = called.func.attr == "copy_"
    plain = all(_is_affine(each, name, uses) if copies else not uses(each) for each in given)
    return plain and _adds(called.func.value, name, uses)


def _is_affine(value: ast.expr, name: str, uses: Callable[[ast.expr], bool]) -> bool:
    """Whether an expression is a number times an attribute, and something else; or has nothing of it."""
    if not uses(value):
        return True
    if isinstance(value, ast.Attribute):
        return value.attr == name
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.USub) and _is_affine(value.operand, name, uses)
    if isinstance(value, ast.BinOp):
        left, right = (_is_affine(each, name, uses) for each in (value.left, value.right))
        alone = isinstance(value.op, (ast.Add, ast.Sub))
        alone |= isinstance(value.op, (ast.Mult, ast.Div)) and not uses(value.right)
        alone |= isinstance(value.op, ast.Mult) and not uses(value.left)
        return alone and left and right
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _SAME:
        return _is_affine(value.func.value, name, uses)
    return False


@functools.lru_cache(maxsize=1024)
def _stored(function: types.FunctionType) -> frozenset[str]:
    definition = definition_of(function)
    lines = () if definition is None else _lines(definition.body)
    return frozenset(name for line in lines for name in _stored_by(line))


def _lines(lines: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Lines of code that run in each step."""
    for line in lines:
        if isinstance(line, (ast.With, ast.For)) or (isinstance(line, ast.If) and _is_training(line.test)):
            yield from _lines(line.body)
        else:
            yield line


def _stored_by(line: ast.stmt) -> Iterator[str]:
    """Attributes that a line stores to, but for those of lines in it."""
    if isinstance(line, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        for target in line.targets if isinstance(line, ast.Assign) else [line.target]:
            for each in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                yield from _attribute(each)
    if isinstance(line, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)):
        yield from _changed(line.value)


def _changed(value: ast.expr | None) -> Iterator[str]:
    """The objects that calls change in place."""
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name in _GROW or (name.endswith("_") and not name.startswith("_")):
                yield from _attribute(node.func.value)


@functools.lru_cache(maxsize=1024)
def _behind_counts(function: types.FunctionType) -> frozenset[str]:
    definition = definition_of(function)
    if definition is None:
        return frozenset()
    counts = set[str]()
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign) and _counts_samples(node.value, counts):
            counts.update(target.id for target in node.targets if isinstance(target, ast.Name))
    found = set[str]()
    for node in ast.walk(definition):
        if isinstance(node, ast.If) and _counts_samples(node.test, counts):
            lines = (each for body in (*node.body, *node.orelse) for each in ast.walk(body))
            found.update(name for line in lines if isinstance(line, ast.stmt) for name in _stored_by(line))
    return frozenset(found)


@functools.lru_cache(maxsize=1024)
def _behind_content(function: types.FunctionType, loops: bool) -> frozenset[str]:
    definition = definition_of(function)
    if definition is None:
        return frozenset()
    return frozenset(_stored_below(definition.body, _not_of_batch(definition), behind=False, loops=loops))


def _not_of_batch(definition: Any) -> set[str]:
    """Names of what a function is given that no batch tells: itself, and the number of the batch."""
    given = [each.arg for each in definition.args.args] if isinstance(definition, ast.FunctionDef) else []
    return {*given[:1], *(given[2:3] if getattr(definition, "name", "") == "training_step" else ())}


def _stored_below(lines: Iterable[ast.stmt], known: set[str], *, behind: bool, loops: bool) -> Iterator[str]:
    """Attributes that lines store to behind a condition on a batch, or once such a condition may have left the code."""
    for line in lines:
        yield from _stored_by(line) if behind else ()
        asks = isinstance(line, (ast.If, ast.While)) and _is_of_batch(line.test, known)
        asks |= loops and isinstance(line, ast.For) and _is_of_batch(line.iter, known)
        for body in ("body", "orelse", "finalbody"):
            yield from _stored_below(getattr(line, body, ()), known, behind=behind or asks, loops=loops)
        behind |= asks and any(isinstance(each, (ast.Return, ast.Continue, ast.Break)) for each in ast.walk(line))


def _is_of_batch(value: ast.expr, known: set[str]) -> bool:
    """Whether an expression has a name in it that is not one of ``known``, but for a question whether there is one."""
    if isinstance(value, ast.Compare) and all(isinstance(each, (ast.Is, ast.IsNot)) for each in value.ops):
        return False
    if isinstance(value, (ast.BoolOp, ast.UnaryOp)):
        parts = value.values if isinstance(value, ast.BoolOp) else [value.operand]
        return any(_is_of_batch(each, known) for each in parts)
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    return not names <= known | {"len", "range", "hasattr", "getattr", "isinstance", "bool", "int", "type"}


def _counts_samples(value: ast.expr, counts: set[str]) -> bool:
    """Whether an expression counts, or has a number that did: but for what is on the module already."""
    for node in ast.walk(value):
        if isinstance(node, ast.Name) and node.id in counts:
            return True
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            of = node.func.value if isinstance(node.func, ast.Attribute) else None
            given = [*node.args, *([of] if of is not None and not isinstance(of, ast.Name) else [])]
            named = [*node.args, *([of] if of is not None else [])]
            if called in _COUNTS and named and not (given and all(map(_is_attribute, given))):
                return True
    return False


def _is_attribute(node: ast.expr) -> bool:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


def _attribute(node: ast.expr) -> Iterator[str]:
    """The attribute of an object that an expression is, or is a part of: ``bank`` in ``self.bank[index]``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setdefault":
        node = node.func.value
    while isinstance(node, (ast.Subscript, ast.Starred)) or (
        isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Subscript, ast.Attribute))
    ):
        if isinstance(node, ast.Attribute):
            yield node.attr
        node = node.value
    if isinstance(node, ast.Attribute):
        yield node.attr


def _is_training(test: ast.expr) -> bool:
    return isinstance(test, ast.Attribute) and test.attr == "training"


@functools.lru_cache(maxsize=1024)
def _of_clocks(function: types.FunctionType) -> frozenset[str]:
    definition = definition_of(function)
    names, found = set[str](), set[str]()
    for node in ast.walk(definition) if definition is not None else ():
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None or not _reads(node.value, names):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                names.add(target.id)
            elif isinstance(target, ast.Attribute):
                found.add(target.attr)
    return frozenset(found)


def _reads(value: ast.expr, names: set[str]) -> bool:
    """Whether an expression calls a clock, or uses what has come of one."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in CLOCKS:
                return True
        if isinstance(node, ast.Name) and node.id in names:
            return True
    return False
