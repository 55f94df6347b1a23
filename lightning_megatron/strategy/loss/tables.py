"""The tables of values that a step can write to: attributes, buffers, dictionaries, objects; globals and closures.

Two extents. What hangs on the module is found in a moment, around a single run of its step; what its code mentions
besides (classes, globals of its Python modules, closures) takes reading the code, for trials::

    self.calls += 1     self.meter.best = x     self.table["n"] += 1        on the module
    Net.calls += 1      CALLS["n"] += 1         def tick(): nonlocal n      beside it
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from lightning_megatron.mesh.draws.given_again import replayed
from lightning_megatron.mesh.parts.names import leaf_of
from lightning_megatron.mesh.parts.packages import METRICS, is_users
from lightning_megatron.pipeline.elsewhere.containers import MISSING, MODULE, Address, Container, resolve
from lightning_megatron.pipeline.elsewhere.reachable import LONGEST, Reach, attributes_set_in, names_in
from lightning_megatron.pipeline.elsewhere.undo import LISTS
from lightning_megatron.strategy.lightning.trainer_access import (
    callbacks_of,
    not_of_trainers,
    optimizers_and_schedulers,
)

Answer = TypeVar("Answer")
Name = tuple[str, Any]
"""Of a table, dots between its parts, and a key in it; ``None`` for what a list holds."""


class PerClass(dict[type, Answer]):
    """Answers to a question about objects of a class, asked once per class.

    Args:
        ask: the question.
    """

    def __init__(self, ask: Callable[[type], Answer]) -> None:
        self._ask = ask

    def __missing__(self, kind: type) -> Answer:
        self[kind] = self._ask(kind)
        return self[kind]


_SCHEDULES: PerClass[bool] = PerClass(lambda kind: issubclass(kind, LRScheduler))
_SET_LATER: PerClass[frozenset[str]] = PerClass(lambda kind: _set_later(kind))
_SCHEDULERS = "lr_schedulers."
_COUNTERS = {"last_epoch", "_step_count"}  # count calls, whatever the batch
NUMBERS = (bool, int, float, complex, str)
_LEAVES = frozenset((*NUMBERS, type(None), Tensor, list))
_LIBRARIES = ("builtins", METRICS, "functools")
_OWN = MODULE - {"training", "forward"}
_WHILE_STEPS_RUN = ("forward", "put_off")  # what this package puts on layers
_LIGHTNINGS = _OWN | frozenset(pl.LightningModule().__dict__) | {"log"}
NOT_USERS = _LIGHTNINGS | set(_WHILE_STEPS_RUN)
"""Names of attributes that are not of the user's own."""

_APPENDED = re.compile(r"\b\w+\.(\w+)(?:\[[^\]\n]*\])?\.append\(")
_EXTENDED = re.compile(r"\b\w+\.(\w+)(?:\[[^\]\n]*\])?(?:\.extend\(|\.insert\(|\s*\+=)")
_ASSIGNED = re.compile(r"\b\w+\.(\w+)\[[^\]\n]*\]+\s*=(?!=)")
_DEPTH = 3
_MOST = 5_000  # containers beside the module; more are data that happens to be in reach
_OUTSIDE = ("global", "globals", "class", "method")
_ON_TRAINER = (("attr", "_trainer"),)


@dataclass(frozen=True)
class Table:
    """Values under keys.

    Attributes:
        name: of the table.
        values: them.
        keys: which of them count.
        address: how it is found again in a later step.
        buffers: whether it is a module's buffers, rather than its attributes.
    """

    name: str
    values: MutableMapping[Any, Any]
    keys: tuple[Any, ...]
    address: Address
    buffers: bool = False

    @property
    def entries(self) -> bool:
        """Whether these are the entries of a list, one by one."""
        return self.address[-1:] == (("entries",),)

    @property
    def is_outside(self) -> bool:
        """Whether it does not hang on a module, but on a class, a function or the Trainer, or is a global."""
        return self.address[1:2] == _ON_TRAINER or any(kind in _OUTSIDE for kind, *_ in self.address)


class _Entries(MutableMapping[Any, Any]):
    """A container that is no dictionary, as one; of a list, the tensors in it."""

    def __init__(self, container: Container) -> None:
        self._container = container

    @property
    def names(self) -> tuple[str, ...] | None:
        """Keys that are looked at; ``None`` for all."""
        return self._container.names

    def _contents(self) -> dict[Any, Any]:
        contents = self._container.contents()
        if isinstance(contents, dict):
            return contents
        return {place: entry for place, entry in enumerate(contents) if type(entry) is Tensor}

    def __getitem__(self, key: Any) -> Any:
        return self._contents()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._container.write(key, value)

    def __delitem__(self, key: Any) -> None:
        self._container.change("drop", key, None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._contents())

    def __len__(self) -> int:
        return len(self._contents())


def tables_on(modules: Iterable[tuple[str, nn.Module]], *, inner: bool = True) -> Iterator[Table]:
    """Attributes and buffers of modules.

    Args:
        modules: with their names.
        inner: also dictionaries, and objects of the user's own classes, inside of attributes.
    """
    seen: set[int] = set()
    for name, child in modules:
        address: Address = (("module", name),)
        if isinstance(child, Metric):  # its states are lists, numbers and tensors, whatever they are called
            keys = tuple([key for key in child.__dict__ if key not in _OWN])
        else:
            ignored = _LIGHTNINGS if isinstance(child, pl.LightningModule) else _OWN
            keys = tuple([key for key in child.__dict__ if key not in ignored])
        yield Table(name, child.__dict__, keys, address)
        if child._buffers:
            yield Table(name, child._buffers, tuple(child._buffers), address, buffers=True)
        for key in keys if inner else ():
            value = child.__dict__[key]
            if type(value) not in _LEAVES:
                yield from _inner(f"{name}.{key}" if name else str(key), value, seen, _DEPTH)


def _inner(name: str, value: Any, seen: set[int], depth: int) -> Iterator[Table]:
    """Tables of dictionaries, and of objects of the user's own classes, inside a value."""
    if depth == 0 or id(value) in seen or isinstance(value, (*NUMBERS, Tensor, nn.Module, type, type(None))):
        return
    if isinstance(value, dict):
        table = value
    elif hasattr(value, "__dict__") and not callable(value) and is_users(type(value), *_LIBRARIES):
        table = value.__dict__
    else:
        return
    seen.add(id(value))
    items = list(table.items())
    yield Table(name, table, tuple(table), ())
    for key, item in items:
        yield from _inner(f"{name}.{key}", item, seen, depth - 1)


def tables_beside(root: nn.Module) -> Iterator[Table]:
    """Everything else that the code of a module refers to: containers in attributes, classes, globals, closures."""
    reach = Reach(root, root, frozenset(), _MOST, LONGEST)
    found = [each for each in reach.containers() if not _is_lightnings(root, each.address)]
    for container in [*found, *_of_trainer(root, reach)]:
        if isinstance(container.value, nn.Module):
            continue
        name, value = _name_of(container.address), container.value
        values = {None: value} if isinstance(value, LISTS) else _values(container)
        yield Table(name, values, tuple(values), container.address)
        if isinstance(value, list):
            items = _Entries(container)
            if items:
                yield Table(name, items, tuple(items), (*container.address, ("entries",)))


def _of_trainer(root: nn.Module, reach: Reach) -> Iterator[Container]:
    """Containers in callbacks, a data module and attributes of the Trainer, as far as the module's code names them."""
    trainer = getattr(root, "_trainer", None)
    if trainer is None:
        return
    named = {name for function in reach.functions for name in names_in(function.__code__)[0]}
    written = {name for function in reach.functions for name in attributes_set_in(function.__code__)}
    address: Address = (("module", ""), *_ON_TRAINER)
    if "callbacks" in named:
        for place, callback in enumerate(callbacks_of(trainer)):
            if is_users(type(callback), *_LIBRARIES):
                yield from reach.also(callback, (*address, ("attr", "callbacks"), ("item", place)))
    own = sorted(not_of_trainers((named & vars(trainer).keys()) | written))
    if "datamodule" in named and getattr(trainer, "datamodule", None) is not None:
        yield from reach.also(trainer.datamodule, (*address, ("attr", "datamodule")))
    if own:
        yield Container(address, trainer, tuple(own))
    for name in own:
        yield from reach.also(vars(trainer).get(name), (*address, ("attr", name)))


def tables_of_optimizers(module: nn.Module) -> Iterator[Table]:
    """Options of the optimizers, such as learning rates, and what their schedulers count; code of a step may set both.

    Args:
        module: the user's, of a run or by itself.
    """
    if not isinstance(module, pl.LightningModule):
        return
    for at, optimizer in enumerate(optimizers_and_schedulers(module)[0]):
        for place, group in enumerate(optimizer.param_groups):
            yield Table(f"optimizers.{at}.param_groups.{place}", group, tuple(group), ())
    for at, scheduler in enumerate(_schedulers_of(module)):
        yield Table(f"{_SCHEDULERS}{at}", vars(scheduler), tuple(vars(scheduler)), ())


def _schedulers_of(module: pl.LightningModule) -> list[LRScheduler]:
    """Those of the run, and those in attributes of the module."""
    own = [value for value in vars(module).values() if _SCHEDULES[value.__class__]]
    return list({id(each): each for each in (*optimizers_and_schedulers(module)[1], *own)}.values())


def names_of_rates(module: nn.Module) -> set[Name]:
    """Names of what schedulers of learning rates write, sooner or later: rates, the best value, how many were worse.

    Args:
        module: the user's.
    """
    if not isinstance(module, pl.LightningModule):
        return set()
    rates = {(table.name, "lr") for table in tables_of_optimizers(module) if not table.name.startswith(_SCHEDULERS)}
    kept = enumerate(map(type, _schedulers_of(module)))
    return rates | {(f"{_SCHEDULERS}{at}", key) for at, kind in kept for key in _SET_LATER[kind] - _COUNTERS}


def _set_later(kind: type) -> frozenset[str]:
    """Attributes that methods of a class set, apart from those that it begins with."""
    functions = (each for base in kind.__mro__[:-1] for each in vars(base).values() if isinstance(each, FunctionType))
    return frozenset().union(*(attributes_set_in(each.__code__) for each in functions if "init" not in each.__name__))


def is_of_scheduler(name: Name) -> bool:
    """Whether a name is that of what a scheduler of learning rates keeps."""
    return name[0].startswith(_SCHEDULERS)


def _values(container: Container) -> MutableMapping[Any, Any]:
    value = container.value
    return value if isinstance(value, dict) and container.names is None else _Entries(container)


def _is_lightnings(root: nn.Module, address: Address) -> bool:
    """Whether a container hangs on one of Lightning's own attributes."""
    first, *rest = address or (("module", ""),)
    if first[0] != "module" or not rest or rest[0][0] != "attr":
        return False
    return rest[0][1] in _LIGHTNINGS and isinstance(root.get_submodule(first[1]), pl.LightningModule)


def _name_of(address: Address) -> str:
    """A container's name; of classes, globals and their code without the module by which they were found."""
    words: list[str] = []
    for kind, *at in address:
        if kind in _OUTSIDE:
            words = [leaf_of(str(word)) for word in at] if kind != "method" else words[:1]
        elif kind == "cell":
            words.append("closure")
        elif kind in ("module", "attr", "item") and at[0] != "__dict__":
            words.append(str(at[0]))
    return ".".join(word for word in words if word)


def found_again(root: nn.Module, table: Table) -> MutableMapping[Any, Any] | None:
    """The values of a table that was found in an earlier step, as it is now; ``None`` where there is none any more."""
    if not table.address:
        return table.values
    entries = table.address[-1] == ("entries",)
    address = table.address[:-1] if entries else table.address
    try:
        value = resolve(root, address)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    if isinstance(value, nn.Module):
        return value._buffers if table.buffers else value.__dict__
    if isinstance(value, LISTS):
        return _Entries(Container(address, value)) if entries else {None: value}
    names = table.values.names if isinstance(table.values, _Entries) else None
    return _values(Container(address, value, names))


def wrap_iterators(table: Table) -> None:
    """Replace the iterators of a table by ones that can be taken back."""
    for key in table.keys:
        value = table.values.get(key, MISSING)
        now = replayed(value)
        if now is not value:
            table.values[key] = now


def spelled(name: Name) -> str:
    """A name in one word."""
    return ".".join(str(part) for part in name if part not in ("", None))


def is_in(name: Name, used: Collection[str]) -> bool:
    """Whether code that uses some names may reach a value: an attribute, a global, or what is in one."""
    table, key = name
    return any(part in used for part in (table.split(".") if table else [str(key)]))


def sendable(name: Name, root: nn.Module) -> Name:
    """A name that other ranks understand: a key that is a module is its path, and another object its class.

    Args:
        name: of a value of this rank.
        root: the module in which modules have their paths.
    """
    table, key = name
    if key is None or isinstance(key, NUMBERS):
        return name
    if isinstance(key, nn.Module):
        path = next((path for path, child in root.named_modules() if child is key), None)
        return table, type(key).__name__ if path is None else path
    plain = isinstance(key, tuple) and all(isinstance(part, (*NUMBERS, type(None))) for part in key)
    return table, key if plain else type(key).__name__


def appended_names(kind: type) -> list[str]:
    """Attributes that the code of a class and of its bases, apart from libraries, appends to and never extends."""
    source = _source_of_user(kind)
    return sorted(set(_APPENDED.findall(source)).difference(_EXTENDED.findall(source)))


def assigned_names(kind: type) -> set[str]:
    """Attributes to whose entries the code of a class and of its bases, apart from libraries, assigns."""
    return set(_ASSIGNED.findall(_source_of_user(kind)))


def _source_of_user(kind: type) -> str:
    bases = (base for base in kind.__mro__ if is_users(base, *_LIBRARIES))
    return "\n".join(map(_source_of, bases))


@functools.lru_cache(maxsize=1024)
def _source_of(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
