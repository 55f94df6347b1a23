"""Does the user's code look at gradients between backward and update, or at weights between update and next step?

With a shared-out optimizer no rank needs the whole sum of a gradient, and a reduce-scatter gives it its shard only.
Hooks that run in between may read or change ``parameter.grad``, though, and must find there what one process finds:
then gradients are all-reduced. Which hooks there are is known when training starts.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_megatron.mesh.parts.bytecode import codes_in, instructions_of, names_in, operations_in
from lightning_megatron.mesh.parts.packages import LIGHTNING, PACKAGE, STANDARD, comes_from, is_users, package_of

_MODULE_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
)
_BEFORE_THE_UPDATE = (
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_exception"),
    *("on_fit_start", "on_train_start", "on_sanity_check_start", "on_sanity_check_end"),
    *("on_save_checkpoint", "on_load_checkpoint", "on_gpu"),
)
_AT_THE_START = ("on_fit_start", "on_train_start", "on_sanity_check_start", "on_train_epoch_start")
_READ = ("grad", "update_and_allocate")  # the latter is peft's, and reads `.grad`
_REGISTER = ("register_hook", "register_post_accumulate_grad_hook")
_REGISTER_STEPS = tuple(f"register_{name}step_{when}_hook" for name in ("", "optimizer_") for when in ("pre", "post"))
_CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_JUMPS = frozenset(dis.opname[each] for each in (*dis.hasjrel, *dis.hasjabs))


def reads_gradients(module: pl.LightningModule, callbacks: list[Callback]) -> bool:
    """Whether a hook of the module or of a callback may look at ``.grad``; callbacks of this package do not."""
    if not module.automatic_optimization:
        return True
    if any(is_overridden(hook, module) for hook in _MODULE_HOOKS):
        return True
    for owner, parent in ((module, None), *((callback, Callback) for callback in foreign_callbacks(callbacks))):
        late = [hook for hook in _AT_THE_START if is_overridden(hook, owner, parent=parent)]
        if any(may_call(owner, hook, _REGISTER) for hook in late):
            return True
    if reads_each_batch(module, callbacks):
        return True
    others = other_callbacks(callbacks)
    return any(is_overridden(hook, callback, parent=Callback) for callback in others for hook in _CALLBACK_HOOKS)


def hooks_steps_later(module: pl.LightningModule, callbacks: list[Callback]) -> bool:
    """Whether a hook of the module or of a callback may register others around the steps of optimizers."""
    owners = ((module, None), *((callback, Callback) for callback in foreign_callbacks(callbacks)))
    late = [hook for hook in dir(Callback) if hook.startswith("on_")]
    hooks = [(owner, h) for owner, parent in owners for h in late if hasattr(owner, h)]
    return any(
        is_overridden(hook, owner, parent=None if owner is module else Callback)
        and may_call(owner, hook, _REGISTER_STEPS)
        for owner, hook in hooks
        if owner is not module or hasattr(pl.LightningModule, hook)
    )


def reads_each_batch(module: pl.LightningModule, callbacks: list[Callback]) -> bool:
    """Whether a step or hook of the module, or of a callback, may look at ``.grad`` after a batch that is accumulated
    with later ones. Users who optimize by hand say themselves what is summed when.
    """
    if not module.automatic_optimization:
        return False
    if may_call(module, "training_step", ("grad",)):  # of the batch before, maybe
        return True
    others = ((callback, Callback) for callback in other_callbacks(callbacks))
    for owner, kind in ((module, pl.LightningModule), *others):
        parent = None if owner is module else Callback
        if is_overridden("on_after_backward", owner, parent=parent):
            return True
        after = [hook for hook in _after_the_update(kind) if is_overridden(hook, owner, parent=parent)]
        if any(may_call(owner, hook, _READ) for hook in after):
            return True
    return False


def sees_earlier_gradients(module: pl.LightningModule, callbacks: list[Callback]) -> bool:
    """Whether user code looks at the gradients of the update before in ``on_before_zero_grad``, or clears them."""
    if is_overridden("optimizer_zero_grad", module) and not _clears_all(module.optimizer_zero_grad):
        return True
    hook = "on_before_zero_grad"
    others = other_callbacks(callbacks)
    return is_overridden(hook, module) or any(is_overridden(hook, other, parent=Callback) for other in others)


def _clears_all(hook: Any) -> bool:
    """Whether a hook does no more than ``optimizer.zero_grad(set_to_none=True)``, without a condition."""
    code = getattr(inspect.unwrap(hook), "__code__", None)
    if code is None or not all(value in (None, True) or isinstance(value, (str, tuple)) for value in code.co_consts):
        return False
    return _JUMPS.isdisjoint(operations_in(code)) and set(code.co_names) in (
        {"zero_grad"},
        {"super", "optimizer_zero_grad"},
    )


def other_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """Those that are not this package's."""
    return [callback for callback in callbacks if not comes_from(type(callback), PACKAGE)]


def reads_weights(module: pl.LightningModule, callbacks: list[Callback]) -> bool:
    """Whether a hook that runs between an update and the next step may look at weights; Lightning's own callbacks ask
    the strategy for them.
    """
    if not module.automatic_optimization or hooks_between_steps(module):
        return True
    hooks, others = _after_the_update(Callback), foreign_callbacks(callbacks)
    return any(is_overridden(hook, callback, parent=Callback) for callback in others for hook in hooks)


@functools.cache
def _after_the_update(kind: type) -> list[str]:
    """Hooks of a class that run between an update and the next step."""
    return [hook for hook in dir(kind) if hook.startswith("on_") and hook not in _BEFORE_THE_UPDATE]


def hooks_between_steps(module: pl.LightningModule) -> list[str]:
    """Hooks of a module's own that run between an update and the next step."""
    more = ("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "transfer_batch_to_device")
    return [hook for hook in (*_after_the_update(pl.LightningModule), *more) if is_overridden(hook, module)]


def foreign_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """Those that are neither Lightning's nor this package's."""
    return [callback for callback in callbacks if not comes_from(type(callback), *LIGHTNING, PACKAGE)]


def may_log(owner: Any, hook: str) -> bool:
    """Whether a hook of a module or callback may call ``log``."""
    return may_call(owner, hook, ("log", "log_dict"))


def logs_itself(owner: Any, hook: str) -> bool:
    """Whether ``self.log`` stands in the code of a hook or step, or in what it names: see :func:`functions_of`."""
    return any(_logs_by_first(function.__code__) for function in functions_of(owner, hook))


def may_branch(owner: Any, hook: str) -> bool:
    """Whether the code of a hook, or what it names, has a condition or a loop."""
    codes = (each for function in functions_of(owner, hook) for each in codes_in(function.__code__))
    return not all(_JUMPS.isdisjoint(operations_in(code)) for code in codes)


def _logs_by_first(code: types.CodeType) -> bool:
    """Whether code, or that of functions in it, uses ``log`` of its first argument, which ``torch.log`` is not."""
    return any(_asks_for_log(each, code.co_varnames[:1]) for each in codes_in(code))


def _asks_for_log(code: types.CodeType, owners: tuple[str, ...]) -> bool:
    steps = [(step.opname, step.argval) for step in instructions_of(code)]
    loads = [name in ("LOAD_ATTR", "LOAD_METHOD") and value in ("log", "log_dict") for name, value in steps]
    return any(asks and _last_loaded(*step) in owners for step, asks in zip(steps, loads[1:], strict=False))


def _last_loaded(name: str, value: Any) -> Any:
    """The variable that an instruction loads, the second one of those that load two; ``None`` for others."""
    if not name.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return None
    return value[-1] if isinstance(value, tuple) else value


def may_call(owner: Any, hook: str, names: Collection[str]) -> bool:
    """Whether a hook of a module or callback may use one of these names, by its code and that of what it names: methods
    of the same object, and the user's functions.
    """
    seen: set[types.CodeType] = set()
    called = _Methods(owner)
    waiting = [getattr(owner, hook)]
    while waiting:
        function = inspect.unwrap(waiting.pop())
        code = getattr(function, "__code__", None)
        if code is None:
            return True  # a partial, or compiled: it cannot be read
        if code in seen:
            continue
        seen.add(code)
        used = names_in(code)
        if any(name in names for name in used):
            return True
        waiting += [method for method in called.by(used) if isinstance(method, types.FunctionType)]
        waiting += _named_by(function, used)
    return False


def names_used(owner: Any, hook: str) -> set[str]:
    """Names that a hook of a module or callback uses, and what it names of the user's code: methods of the same object,
    and functions.
    """
    return {name for function in functions_of(owner, hook) for name in names_in(function.__code__)}


def functions_of(owner: Any, hook: str) -> list[types.FunctionType]:
    """The functions of a hook of a module or callback: its own, and those of the user's code that they name."""
    found: dict[types.CodeType, types.FunctionType] = {}
    waiting, called = [getattr(owner, hook)], _Methods(owner)
    while waiting:
        function = inspect.unwrap(waiting.pop())
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is None or code in found:
            continue
        found[code] = function
        names = names_in(code)
        named = called.by(names)
        waiting += [each for each in named if isinstance(each, types.FunctionType) and _is_foreign(each)]
        waiting += _named_by(function, names)
    return list(found.values())


def _named_by(function: Any, names: Collection[str]) -> list[types.FunctionType]:
    """The user's functions that a function names: in its module, in what it encloses, and in modules that it names or
    imports itself (``import helpers`` and ``helpers.norms(self)``).
    """
    table: dict[str, Any] = getattr(function, "__globals__", {})
    named = [*(table.get(name) for name in names), *_enclosed(function)]
    homes = [each for each in named if isinstance(each, types.ModuleType)]
    if "IMPORT_NAME" in operations_in(function.__code__):
        homes += [sys.modules[name] for name in names if name in sys.modules]
    homes = [home for home in homes if _is_foreign(home) and package_of(home) not in STANDARD]
    named += [vars(home).get(name) for home in homes for name in names]
    return [each for each in named if isinstance(each, types.FunctionType) and _is_foreign(each)]


def _enclosed(function: Any) -> Iterator[Any]:
    """Values of another function's variables that one defined in it uses."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # no value yet
            yield cell.cell_contents


class _Methods:
    """Functions among the attributes of an object and of its classes.

    Args:
        owner: the object.
    """

    def __init__(self, owner: Any) -> None:
        kinds = (*type(owner).__mro__, *(owner.__mro__ if isinstance(owner, type) else ()))
        self._owner = owner
        self._tables: list[Mapping[str, Any]] = [getattr(owner, "__dict__", {}), *(vars(kind) for kind in kinds)]
        self._attributes = set[str]().union(*self._tables)

    def by(self, names: Collection[str]) -> Iterator[Any]:
        """Those of these names, and with ``super`` those of the classes above as well, for ``super().name``."""
        kinds = type(self._owner).__mro__ if "super" in names else ()
        above = [vars(kind) for kind in kinds if _is_foreign(kind)]
        for name in names:
            if name not in self._attributes:
                continue
            if any(isinstance(table.get(name), types.FunctionType) for table in self._tables):
                yield inspect.getattr_static(self._owner, name, None)
                yield from (table.get(name) for table in above)


def takes_second_gradients(module: pl.LightningModule) -> bool:
    """Whether ``create_graph`` occurs in the code of the module, of its parts, or of functions that these name."""
    seen: set[types.CodeType] = set()
    waiting = [f for kind in {type(child) for child in module.modules()} for f in _methods(kind)]
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        if "create_graph" in _keywords(function.__code__):
            return True
        names = set(names_in(function.__code__))
        waiting += _named_by(function, names)
    return False


def writes_unseen(module: nn.Module) -> bool:
    """Whether ``.data`` occurs in the code of a step: writes through it do not count as versions of a tensor."""
    return "data" in step_names(module)


def step_names(module: nn.Module) -> set[str]:
    """Names in the code of the training step and of all forwards, and in what these name: methods of the module and of
    its parts, and functions.
    """
    found: set[str] = set()
    seen: set[types.CodeType] = set()
    methods: dict[str, list[types.FunctionType]] = {}
    for kind in {type(child) for child in module.modules()}:
        for function in _methods(kind):
            methods.setdefault(function.__name__, []).append(function)
    waiting = [*methods.get("training_step", ()), *methods.get("forward", ())]
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = set(names_in(function.__code__))
        found |= names
        waiting += _named_by(function, names)
        waiting += [each for name in names for each in methods.get(name, ())]
    return found


def _methods(kind: type) -> Iterator[types.FunctionType]:
    for base in kind.__mro__:
        if _is_foreign(base):
            yield from (value for value in vars(base).values() if isinstance(value, types.FunctionType))


def _is_foreign(thing: Any) -> bool:
    """Whether a class, function or module is the user's, or at least not a part of what this package builds on."""
    return is_users(thing, "builtins", "transformers")


def _keywords(code: types.CodeType) -> Iterator[Any]:
    """Keywords of the calls in a function's code, and other constants of the same form."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _keywords(constant)
        elif isinstance(constant, tuple):
            yield from constant
