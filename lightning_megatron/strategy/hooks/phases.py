"""Phases of training that the code of a step tells apart: what it asks about steps, epochs and its own settings.

What was found of the loss in one step holds as long as the same code runs. Code that changes with time says so::

    if self.current_epoch >= 2:  loss = loss + contrast(h)        False, False, ..., True     a phase begins
    beta = min(1.0, self.global_step / 1000)                      0, then not 0               another one does
    return self.total(h, y, batch_idx > 3)                        followed into the method
    match self.trainer.global_step: case 0 | 1: ...               conditions, one a case
    return self.losses[batch_idx % 3](h, y)                       a function that was not called before

Such expressions are read in the source of ``training_step``, and of the methods, modules and functions of the user's
that it calls. They are computed before each step; where one is true or false for the first time, or chooses a function
or a word that it has not chosen before, the step is tried again. Those of steps and epochs are the same on all ranks,
so that all of them try at once. A switch such as ``if self.warm:`` may be thrown on one rank only: the others hear of
it after the step, and the next one is tried. Hooks that are registered on modules later are such a change of code.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_megatron.mesh.parts.packages import HUGGING_FACE, METRICS, is_users
from lightning_megatron.mesh.parts.syntax import definition_of
from lightning_megatron.strategy.hooks.added_later import AddedHooks
from lightning_megatron.strategy.hooks.expressions import (
    TEXT,
    as_attribute,
    chains_of,
    condition_of,
    is_text,
    is_word,
    known_parts,
    stores,
)
from lightning_megatron.strategy.lightning.trainer_access import batch_number

_TIMES = {"current_epoch", "global_step", "batch_idx", "total_batch_idx"}
_TRAINERS = _TIMES | {"trainer", "max_epochs", "max_steps", "num_training_batches", "estimated_stepping_batches"}
_BATCH = "batch_idx"  # under which expressions have the number of the batch
_SELF = "self"  # and the user's module
_FUNCTIONS = {each.__name__: each for each in (abs, bool, float, int, max, min, round)}
_LIBRARIES = ("builtins", METRICS, *HUGGING_FACE)
_CHOOSERS = {"getattr": getattr, "repr": repr}
_PLAIN = (bool, int, float, str, type(None))
_PARTS = (ast.Attribute, ast.Subscript, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Tuple)
_MOST = 64  # functions that are read, expressions that are computed, and choices of one of them that are tried


class Phases:
    """The parts of a step's code that depend on when it runs.

    Args:
        module: the user's, whose ``training_step`` is read.

    Attributes:
        changed: whether something about steps or epochs is true, or false, for the first time; or hooks have come.
        switched: the same of a switch on this rank.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module, self._hooks = module, AddedHooks(module)
        reader = _Reader(module)
        self._times = [_compiled(each) for each in reader.times][:_MOST]
        self._switches = [_compiled(each) for each in reader.switches][:_MOST]
        self._seen: dict[CodeType, set[Any]] = {code: set() for code in (*self._times, *self._switches)}
        self._now: dict[CodeType, Any] = {}
        self.changed = self.switched = False

    def look(self) -> None:
        """Compute what holds in the step that comes."""
        self._hooks.look()
        self.changed, self.switched = self._hooks.came, False
        if not self._seen:
            return
        names: dict[str, Any] = {**_FUNCTIONS, **_CHOOSERS, "math": math, "__builtins__": {}, _SELF: self._module}
        if (number := batch_number(self._module)) is not None:
            names[_BATCH] = number
        self._now = {code: value for code in self._seen if (value := _chosen(code, names)) is not None}
        seen = self._seen
        new = {code for code, value in self._now.items() if value not in seen[code] and len(seen[code]) < _MOST}
        self.changed |= any(code in new for code in self._times)
        self.switched |= any(code in new for code in self._switches)

    def note(self) -> None:
        """Take what holds now as tried."""
        for code, value in self._now.items():
            self._seen[code].add(value)
        self.changed = self.switched = False


def _chosen(code: CodeType, names: dict[str, Any]) -> Any:
    """Whether an expression is true; the word, the function or the module that it chooses."""
    try:
        value = eval(code, names)  # of the user's own code: attributes, numbers, comparisons
    except Exception:  # what it is about is not there, as on another stage or before it is set
        return None
    if isinstance(value, _PLAIN):
        return value if isinstance(value, str) else bool(value)
    function = getattr(value, "__func__", value)
    if inspect.isfunction(function):
        return function.__code__
    return value if isinstance(value, (functools.partial, nn.Module)) else None


def _compiled(expression: ast.expr) -> CodeType:
    return compile(ast.fix_missing_locations(ast.Expression(expression)), "<phase>", "eval")


class _Reader:
    """Reads expressions in functions, and follows the calls in them.

    Args:
        module: the user's.

    Attributes:
        times: expressions of the number of a step, batch or epoch.
        switches: conditions on attributes.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module, self._set_later = module, set(_set_later(type(module)))
        self.times: list[ast.expr] = []
        self.switches: list[ast.expr] = []
        self._read: set[Any] = set()
        definition = definition_of(module.training_step)
        parameters = [each.arg for each in definition.args.args[1:]] if definition is not None else []
        known: dict[str, ast.expr] = {name: ast.Name(_BATCH, ast.Load()) for name in parameters[1:2]}
        self._function(module.training_step, ast.Name(_SELF, ast.Load()), known)
        self.times, self.switches = _once(self.times), _once(self.switches)

    def _function(self, function: Callable[..., Any], owner: ast.expr | None, given: dict[str, ast.expr]) -> None:
        function = inspect.unwrap(function)
        function = getattr(function, "__func__", function)
        definition = definition_of(function)
        told = function, *((name, ast.dump(value)) for name, value in given.items())
        if told in self._read or definition is None or len(self._read) >= _MOST:
            return
        self._read.add(told)
        known = dict(given)
        if owner is not None and definition.args.args:
            known[definition.args.args[0].arg] = owner
        scope = _Scope(known, function, owner)
        scope.learn(definition)
        for statement in definition.body:
            self._visit(statement, scope)

    def _visit(self, node: ast.AST, scope: _Scope, *, asked: bool = False) -> None:
        stored = stores(node)  # `self.seen[batch_idx] = ...` asks nothing
        pure = scope.pure(node) if isinstance(node, ast.expr) and not (stored or isinstance(node, ast.BoolOp)) else None
        if pure is not None:
            bare = isinstance(pure, (ast.Name, ast.Attribute, ast.Constant)) or is_text(pure)  # handed on, not asked
            if not self._computes(pure) and (asked or not bare):
                if _is_of_time(pure) and self._is_everywhere(pure):
                    self.times.append(pure)
                elif asked or _is_of_time(pure):
                    self.switches.append(pure)
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            return
        if isinstance(node, ast.Match):
            self._match(node, scope)
        elif isinstance(node, ast.Subscript) and not (stored or isinstance(node.slice, (ast.Slice, ast.Tuple))):
            self._choose(scope.pure(node.slice))
        elif isinstance(node, ast.Call):
            self._choose_by_name(node, scope)
            self._follow(node, scope)
        for name, value in ast.iter_fields(node):
            asks = name == "test" or (asked and isinstance(node, (ast.BoolOp, ast.UnaryOp)))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self._visit(child, scope, asked=asks)

    def _match(self, node: ast.Match, scope: _Scope) -> None:
        """Ask for the cases of a statement, or for its subject itself where they are none of numbers and words."""
        pure = scope.pure(node.subject)
        subject = pure or known_parts(node.subject, scope.pure)
        if subject is None:
            return
        conditions = [condition_of(case, subject, scope.pure, scope.known) for case in node.cases]
        if None in conditions:
            self._choose(pure)
        for condition in conditions:
            if condition is not None and not isinstance(condition, ast.Constant):
                timed = _is_of_time(condition) and self._is_everywhere(condition)
                (self.times if timed else self.switches).append(condition)

    def _choose(self, of: ast.expr | None, entry: ast.expr | None = None) -> None:
        """Ask for what an expression of time is, such as the place in a list, or for the entry that it finds."""
        if of is not None and _is_of_time(of):
            asked = entry or ast.Call(ast.Name("repr", ast.Load()), [of], [])
            (self.times if self._is_everywhere(of) else self.switches).append(asked)

    def _choose_by_name(self, call: ast.Call, scope: _Scope) -> None:
        """Ask which attribute ``getattr`` finds, and which entry ``get``."""
        given = [scope.pure(each) for each in call.args]
        pure = [each for each in given if each is not None]
        if call.keywords or not pure or len(pure) < len(given):
            return
        if isinstance(call.func, ast.Name) and call.func.id == "getattr" and not is_word(pure[1]):
            found = ast.Call(ast.Name("getattr", ast.Load()), pure, [])
            timed = any(map(_is_of_time, pure))
            (self.times if timed and self._is_everywhere(pure[-1]) else self.switches).append(found)
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "get":
            table = scope.pure(call.func.value)
            if table is None:
                self._choose(pure[0])
            elif isinstance(self._value(table), dict):
                entry = ast.Call(ast.Attribute(table, "get", ast.Load()), pure, [])
                self._choose(ast.Tuple([table, pure[0]], ast.Load()), entry)

    def _follow(self, call: ast.Call, scope: _Scope) -> None:
        """Read what a call runs, if it is a method, a module or a function of the user's."""
        if isinstance(call.func, ast.Name):
            function = scope.names.get(call.func.id)
            if inspect.isfunction(function) and is_users(function, *_LIBRARIES):
                self._function(function, None, _given(function, call, scope, bound=False))
            return
        if (above := scope.above(call.func)) is not None:
            if is_users(above, *_LIBRARIES):
                self._function(above, scope.owner, _given(above, call, scope, bound=True))
            return
        chain = scope.pure(call.func)
        if isinstance(chain, ast.Subscript) and isinstance(table := self._value(chain.value), (dict, list, tuple)):
            for each in table.values() if isinstance(table, dict) else table:
                function = getattr(each, "__func__", each)
                if inspect.isfunction(function) and is_users(function, *_LIBRARIES):
                    mine = getattr(each, "__self__", None) is self._module
                    owner_of = ast.Name(_SELF, ast.Load()) if mine else None
                    self._function(function, owner_of, _given(function, call, scope, bound=mine))
            return
        if not isinstance(chain, ast.Attribute):
            return
        found, owner = self._value(chain), self._value(chain.value)
        if isinstance(found, nn.Module):
            found, chain_of = found.forward, chain
        elif inspect.ismethod(found) and isinstance(owner, nn.Module):
            chain_of = chain.value  # type: ignore[assignment]
        else:
            return
        if is_users(found, *_LIBRARIES):
            self._function(found, chain_of, _given(found, call, scope, bound=True))

    def _is_everywhere(self, expression: ast.expr) -> bool:
        """Whether all ranks have the same: attributes of the trainer, hyperparameters, and what a constructor sets."""
        for chain in chains_of(expression):
            own = not any(chain[1:]) and chain[0] not in self._set_later and not hasattr(pl.LightningModule, chain[0])
            if not (own or chain[0] == "hparams" or set(chain) <= _TRAINERS):
                return False
        return True

    def _computes(self, expression: ast.expr) -> bool:
        """Whether to read an attribute runs code of the user's, which is then read itself."""
        computes = False
        for part in ast.walk(expression):
            if isinstance(part, ast.Attribute) and part.attr not in _TRAINERS:
                found = inspect.getattr_static(type(self._value(part.value)), part.attr, None)
                if isinstance(found, property) and found.fget is not None and is_users(found.fget, *_LIBRARIES):
                    self._function(found.fget, part.value, {})
                    computes = True
        return computes

    def _value(self, expression: ast.expr) -> Any:
        try:
            return eval(_compiled(copy.deepcopy(expression)), {_SELF: self._module, "__builtins__": {}})
        except Exception:  # an attribute that is set later
            return None


class _Scope:
    """The names in a function of which it is known what they stand for.

    Args:
        known: name -> expression of the module and the number of the batch.
        function: the function.
        owner: what its first argument stands for, if it is a method.

    Attributes:
        names: globals of the function.
        owner: as given.
        known: with what is learnt in the function.
    """

    def __init__(self, known: dict[str, ast.expr], function: Any, owner: ast.expr | None) -> None:
        self.names: dict[str, Any] = getattr(function, "__globals__", {})
        self.owner, self._function, self.known, self._local = owner, function, known, set[str]()

    def above(self, function: ast.expr) -> Any:
        """The method of a base class in ``super().method``; ``None`` for anything else."""
        if not isinstance(function, ast.Attribute):
            return None
        whose = function.value
        if not (isinstance(whose, ast.Call) and isinstance(whose.func, ast.Name) and whose.func.id == "super"):
            return None
        free = dict(zip(self._function.__code__.co_freevars, self._function.__closure__ or (), strict=True))
        kind = free["__class__"].cell_contents if "__class__" in free else object
        found = (vars(base).get(function.attr) for base in kind.__mro__[1:])
        return next((method for method in found if inspect.isfunction(method)), None)

    def learn(self, definition: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Take names that are set once, to an expression of what is known, for that expression."""
        arguments = definition.args
        self._local = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        stored = [node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and stores(node)]
        self._local.update(stored)
        for name in stored:
            self.known.pop(name, None)
        for node in ast.walk(definition):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if stored.count(name) == 1 and (pure := self.pure(node.value)) is not None:
                    self.known[name] = pure

    def pure(self, node: ast.expr) -> ast.expr | None:
        """The expression in terms of the module and the number of the batch; ``None`` if it is of anything else."""
        if isinstance(node, ast.Constant):
            return node
        if isinstance(node, ast.Name):
            value = self.names.get(node.id)
            constant = node.id not in self._local and node.id in self.names and isinstance(value, _PLAIN)
            return ast.Constant(value) if constant else copy.deepcopy(self.known.get(node.id))
        if isinstance(node, ast.Call):
            function = node.func
            if (attribute := as_attribute(node)) is not None:
                return self.pure(attribute)
            whose = function.value if isinstance(function, ast.Attribute) else None
            own = isinstance(function, ast.Name) and function.id in _FUNCTIONS and function.id not in self._local
            if node.keywords or not (own or (isinstance(whose, ast.Name) and self.names.get(whose.id) is math)):
                return None
            arguments = [self.pure(each) for each in node.args]
            if None in arguments:
                return None
            named = ast.Name(function.id, ast.Load()) if isinstance(function, ast.Name) else function
            if isinstance(function, ast.Attribute):
                named = ast.Attribute(ast.Name("math", ast.Load()), function.attr, ast.Load())
            return ast.Call(named, arguments, [])  # type: ignore[arg-type]
        if not isinstance(node, (*_PARTS, *TEXT)):
            return None
        made = copy.copy(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                value = self.pure(value)
                if value is None:
                    return None
            elif isinstance(value, list) and value and isinstance(value[0], ast.expr):
                value = [self.pure(each) for each in value]
                if None in value:
                    return None
            setattr(made, name, value)
        return made


def _set_later(kind: type) -> Iterator[str]:
    """Attributes that methods of the user's classes set, other than constructors."""
    for base in kind.__mro__:
        for name, function in vars(base).items() if is_users(base, *_LIBRARIES) else ():
            definition = definition_of(function) if inspect.isfunction(function) and name != "__init__" else None
            for node in ast.walk(definition) if definition is not None else ():
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
                    yield node.attr


def _is_of_time(expression: ast.expr) -> bool:
    """Whether an expression depends on the number of a step, batch or epoch."""
    return any(
        (isinstance(part, ast.Name) and part.id == _BATCH) or (isinstance(part, ast.Attribute) and part.attr in _TIMES)
        for part in ast.walk(expression)
    )


def _given(function: Any, call: ast.Call, scope: _Scope, *, bound: bool) -> dict[str, ast.expr]:
    """Values of the parameters of a called function."""
    definition = definition_of(function)
    if definition is None or any(isinstance(each, ast.Starred) for each in call.args):
        return {}
    names = [each.arg for each in definition.args.args][1 if bound else 0 :]
    arguments = [*zip(names, call.args, strict=False), *((each.arg, each.value) for each in call.keywords if each.arg)]
    given = {name: scope.pure(value) for name, value in arguments}
    return {name: pure for name, pure in given.items() if name is not None and pure is not None}


def _once(expressions: list[ast.expr]) -> list[ast.expr]:
    return list({ast.dump(each): each for each in expressions}.values())
