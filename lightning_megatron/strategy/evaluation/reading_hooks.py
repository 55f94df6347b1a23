"""Finds the hooks that read what steps keep, and whether they know that there are replicas.

Since no hook after an epoch is given the outputs of its steps, modules keep them by hand::

    def validation_step(self, batch, batch_idx):       def on_validation_epoch_end(self):
        self.outputs.append(self(x))                       self.log("spread", torch.cat(self.outputs).std())

Such a hook is written for one process, which has the outputs of all samples. One that gathers by itself, that asks for
its rank, or that updates a metric, which is put together over the replicas by itself, is given its replica's own.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_megatron.mesh.parts.bytecode import names_in
from lightning_megatron.mesh.parts.packages import METRICS, comes_from, is_users
from lightning_megatron.mesh.parts.syntax import definition_of, place_in
from lightning_megatron.pipeline.elsewhere.reachable import attributes_set_in, functions_of_step
from lightning_megatron.strategy.lightning.hooks import foreign_callbacks, functions_of, may_log

_GATHERS = frozenset(
    ("all_gather", "all_gather_object", "all_gather_into_tensor", "all_reduce", "gather_object", "reduce_scatter")
)
_ASKS = frozenset(("get_rank", "get_world_size", "world_size", "num_devices", "distributed", "dist", "strategy"))
_RANKS = ("global_rank", "local_rank")
_COLLECT = frozenset(("append", "extend", "add", "update", "clear", "zero_", "fill_", "add_"))
_BETWEEN = (
    *("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step"),
    *("on_before_zero_grad", "lr_scheduler_step", "on_train_batch_end", "on_train_batch_start"),
)
_STEERS = frozenset(("grad", "param_groups", "optimizers", "parameters", "requires_grad_"))
_LATE = ("on_train_epoch_end", "on_train_end", "on_fit_end")


def names_read(module: pl.LightningModule, callbacks: Iterable[Callback], loop: str) -> set[str]:
    """Names in the hooks after a loop that do not know of replicas, but for those in hooks that do.

    Args:
        module: the user's.
        callbacks: of the Trainer.
        loop: ``train``, ``validation`` or ``test``.
    """
    hooks = hooks_behind(loop)
    owners: list[tuple[Any, Any]] = [(module, None)]
    owners += [(callback, Callback) for callback in foreign_callbacks(callbacks)]
    unaware, aware = set[str](), set[str]()
    for owner, parent in owners:
        for names, known in _names(owner, parent, hooks, module):
            (aware if known else unaware).update(names)
    return unaware - aware


def names_steering(module: pl.LightningModule, callbacks: Iterable[Callback]) -> tuple[set[str], list[str]]:
    """Names in the hooks between a step of training and the next that steer it: they set what the step reads, or have
    to do with gradients, weights and optimizers, and do not know of replicas. And their lines that read what the step
    has returned besides the loss.

    Args:
        module: the user's.
        callbacks: of the Trainer.
    """
    owners: list[tuple[Any, Any]] = [(module, None), *((each, Callback) for each in foreign_callbacks(callbacks))]
    functions = [*functions_of(module, "training_step"), *functions_of_step(module)]  # `self(x)` names no forward
    step = {name for function in functions for name in _names_kept_by(function.__code__)}
    step |= _names_in_layers_hooks(module)
    found, lines = set[str](), list[str]()
    for owner, parent in owners:
        for hook in _BETWEEN:
            for names, known in _names(owner, parent, (hook,), module):
                set_here = {name for each in functions_of(owner, hook) for name in attributes_set_in(each.__code__)}
                if not known and (step & set_here or _STEERS & names):
                    found |= names & step
                    if hook == "on_train_batch_end":
                        lines += _other_outputs(getattr(owner, hook), 1 if parent is None else 3)
    return found, lines


def _names_kept_by(code: types.CodeType) -> set[str]:
    """Names in code, and those that it may give ``setattr``."""
    names = set(names_in(code))
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    if "setattr" in names:
        names |= {each for each in code.co_consts if isinstance(each, str) and each.isidentifier()}
    return names.union(*map(_names_kept_by, inner))


def _names_in_layers_hooks(module: pl.LightningModule) -> set[str]:
    """Names in the user's hooks on layers, which steps run, and attributes of the module for what their closures hold:
    ``self.seen = seen`` beside ``layer.register_forward_hook(lambda *_: seen.append(...))``.
    """
    found, held = set[str](), set[int]()
    tables = (table for child in module.modules() for table in (child._forward_hooks, child._forward_pre_hooks))
    for hook in (hook for table in tables for hook in table.values()):
        function: Any = inspect.unwrap(getattr(hook, "func", hook))
        code = getattr(function, "__code__", None)
        if code is not None and is_users(function, "builtins", METRICS):
            found |= {*_names_kept_by(code), *code.co_freevars}
            cells = getattr(getattr(function, "__func__", function), "__closure__", None) or ()
            for cell in cells:
                with suppress(ValueError):  # no value yet
                    held.add(id(cell.cell_contents))
    return found | {name for name, value in vars(module).items() if id(value) in held}


def _other_outputs(hook: Any, place: int) -> Iterator[str]:
    """Lines of a hook that read entries of ``outputs``, its argument at a place, other than the loss."""
    definition, code = definition_of(hook), getattr(hook, "__code__", None)
    if definition is None or code is None:
        return
    given = [each.arg for each in definition.args.args[place : place + 1]]
    for node in ast.walk(definition):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in given:
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if key != "loss":
                yield f"`{ast.unparse(node)}` in {place_in(code, node.lineno)}"


def names_collected(callback: Callback, module: pl.LightningModule, loop: str) -> set[str]:
    """Names in hooks of a callback after a loop that log, or set what is not the callback's, and do not know of
    replicas, if it looks at each batch.

    Args:
        callback: of the user's.
        module: the user's.
        loop: ``train``, ``validation`` or ``test``.
    """
    hook = f"on_{loop}_batch_end"
    if not is_overridden(hook, callback, parent=Callback) or not _looks_at_batches(getattr(callback, hook)):
        return set()
    told = [hook for hook in _behind(loop) if may_log(callback, hook) or _sets_elsewhere(callback, hook)]
    return {name for names, known in _names(callback, Callback, told, module) if not known for name in names}


def names_only_collected(module: pl.LightningModule, callbacks: Iterable[Callback], names: set[str]) -> set[str]:
    """Those of ``names`` that no code but the hooks after training reads: others append to them, add to them, or set
    them anew.

    Args:
        module: the user's.
        callbacks: of the Trainer.
        names: that the hooks after training read.
    """
    behind, found = _behind("train"), set(names)
    if not found:
        return found
    owners: list[tuple[Any, type]] = [(each, Callback) for each in foreign_callbacks(callbacks)]
    owners += [(module, pl.LightningModule)]
    methods = [(owner, hook) for owner, parent in owners for hook in _overridden(owner, parent) if hook not in behind]
    kinds = {type(child): child for child in module.modules() if child is not module}.values()
    methods += [(child, "forward") for child in kinds if not comes_from(type(child), "torch", METRICS)]
    functions = [function for owner, hook in methods for function in functions_of(owner, hook)]
    for function in (*functions, *_getters(module)):
        used = found.intersection(names_in(function.__code__))
        if used:
            definition = definition_of(function)
            found -= used if definition is None else {name for name in used if not _only_collects(definition, name)}
    return found


def _getters(module: pl.LightningModule) -> Iterator[types.FunctionType]:
    """Functions that compute the user's properties: any code may read them."""
    kinds = type(module).__mro__[: type(module).__mro__.index(pl.LightningModule)]
    for value in (value for kind in kinds for value in vars(kind).values()):
        getter = value.fget if isinstance(value, property) else getattr(value, "func", None)
        if isinstance(getter, types.FunctionType):
            yield getter


def _overridden(owner: Any, parent: type) -> list[str]:
    """Hooks and steps that the user's code defines."""
    kinds = type(owner).__mro__[: type(owner).__mro__.index(parent)]
    own = {name for kind in kinds for name, value in vars(kind).items() if callable(value) and name != "__init__"}
    own.update(name for name, value in vars(owner).items() if callable(value))
    return [name for name in sorted(own) if callable(getattr(parent, name, None)) or name == "forward"]


def _only_collects(definition: ast.AST, name: str) -> bool:
    """Whether code does nothing with an attribute or global of this name but append to it, add to it, or set it."""
    allowed = set[int]()
    for node in ast.walk(definition):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Attribute) and called.attr in _COLLECT:
                allowed.update(map(id, _chain(called.value)))
        elif isinstance(node, (ast.Attribute, ast.Subscript, ast.Name)) and not isinstance(node.ctx, ast.Load):
            allowed.update(map(id, _chain(node)))
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = ast.unparse(node.targets[0])
            same = (each for each in ast.walk(node.value) if isinstance(each, ast.expr) and ast.unparse(each) == target)
            allowed.update(id(part) for each in same for part in _chain(each))
    return all(
        id(node) in allowed
        for node in ast.walk(definition)
        if (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)
    )


def _chain(node: ast.expr) -> Iterator[ast.expr]:
    """An attribute or entry, and what it is one of: `self.meter.total`, `self.meter`, `self`."""
    while True:
        yield node
        if not isinstance(node, (ast.Attribute, ast.Subscript)):
            return
        node = node.value


def _sets_elsewhere(callback: Callback, hook: str) -> bool:
    """Whether a hook assigns to an attribute or entry of anything but the callback: a learning rate, a threshold."""
    for function in functions_of(callback, hook):
        definition = definition_of(function)
        for node in ast.walk(definition) if definition is not None else ():
            if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
                *_, owner = _chain(node)
                if not (isinstance(owner, ast.Name) and owner.id == "self"):
                    return True
    return False


def hooks_behind(loop: str) -> tuple[str, ...]:
    """Hooks that may read what the steps of a loop have kept.

    Args:
        loop: ``train``, ``validation`` or ``test``.
    """
    return (*_behind(loop), *(_LATE if loop == "validation" else ()))


def _behind(loop: str) -> tuple[str, str]:
    return f"on_{loop}_epoch_end", f"on_{loop}_end"


def _names(
    owner: Any, parent: type | None, hooks: Iterable[str], module: pl.LightningModule
) -> Iterator[tuple[set[str], bool]]:
    """Names in each of some hooks, and whether it knows of replicas."""
    for hook in hooks:
        if is_overridden(hook, owner, parent=parent):
            functions = functions_of(owner, hook)
            names = {name for function in functions for name in names_in(function.__code__)}
            known = not _GATHERS.isdisjoint(names) or not _ASKS.isdisjoint(names)
            known = known or any(_asks_for_rank(each) or _updates_metrics(each, owner, module) for each in functions)
            yield names, known


def _looks_at_batches(hook: Any) -> bool:
    """Whether a hook uses the outputs or the batch that it is given."""
    definition = definition_of(hook)
    if definition is None:
        return True
    given = {each.arg for each in definition.args.args[3:5]} | {each.arg for each in definition.args.kwonlyargs}
    given |= {definition.args.vararg.arg} if definition.args.vararg is not None else set()
    return any(isinstance(node, ast.Name) and node.id in given for node in ast.walk(definition))


def _asks_for_rank(function: Any) -> bool:
    """Whether a function uses the number of its rank, but to let one rank write: ``if self.global_rank == 0``."""
    definition = definition_of(function)
    if definition is None:
        return not set(_RANKS).isdisjoint(names_in(function.__code__))
    compared = {id(side) for node in ast.walk(definition) if isinstance(node, ast.Compare) for side in _sides(node)}
    tested = {id(node.operand) for node in ast.walk(definition) if isinstance(node, ast.UnaryOp)}
    return any(
        isinstance(node, ast.Attribute) and node.attr in _RANKS and id(node) not in compared | tested
        for node in ast.walk(definition)
    )


def _sides(node: ast.Compare) -> Iterator[ast.expr]:
    sides = [node.left, *node.comparators]
    return iter(sides if any(isinstance(side, ast.Constant) and side.value == 0 for side in sides) else ())


def _updates_metrics(function: Any, owner: Any, module: pl.LightningModule) -> bool:
    """Whether a function calls or updates a metric that hangs on its object or on the module."""
    metrics = {name for each in (owner, module) for name, value in _attributes(each) if _holds_metrics(value)}
    names = metrics.intersection(names_in(function.__code__))
    if not names:
        return False
    definition = definition_of(function)
    if definition is None or not {"update", "forward"}.isdisjoint(names_in(function.__code__)):
        return True
    calls = (node.func for node in ast.walk(definition) if isinstance(node, ast.Call))
    return any(_root(called) in names for called in calls)


def _root(called: ast.expr) -> str:
    """The attribute that is called: ``f1`` in ``self.f1(...)`` and ``self.f1["macro"](...)``."""
    while isinstance(called, ast.Subscript):
        called = called.value
    return called.attr if isinstance(called, ast.Attribute) else ""


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    yield from vars(owner).items()
    if isinstance(owner, nn.Module):
        yield from owner.named_children()


def _holds_metrics(value: Any) -> bool:
    if isinstance(value, (Metric, MetricCollection)):
        return True
    if isinstance(value, nn.Module):
        return any(isinstance(child, Metric) for child in value.modules())
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(isinstance(entry, (Metric, MetricCollection)) for entry in entries)
