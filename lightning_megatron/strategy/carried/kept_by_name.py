"""Values that hooks keep of each weight under its name, as hooks see it that read all of it.

Averages of weights are kept in a dictionary. Each stage updates what it has the weights of, as ``named_parameters()``
gives it these, and where a hook puts them into the weights by name, that is all it needs. One that reads the dictionary
itself would find the others as they were in the beginning, or not at all::

    for name, p in self.named_parameters(): self.shadow[name].lerp_(p, 0.1)       a stage's own
    self.log("shadow", sum(v.norm() for v in self.shadow.values()))               those of all stages

So before such a hook every stage tells the others what it has. After it, what a stage had no entry for is taken out
again. Old entries are renewed at the end of training too. What a checkpoint gets is put together when it is saved
(``strategy.saving.kept_names``).
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.parts.bytecode import names_in
from lightning_megatron.mesh.parts.packages import METRICS, is_users
from lightning_megatron.mesh.parts.syntax import definition_of
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.pipeline.elsewhere.presence import Presence
from lightning_megatron.strategy.carried.under_names import ByName, KeyForm, Table, ToldEntry
from lightning_megatron.strategy.lightning.hooks import foreign_callbacks, functions_of
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of

_BY_NAME = frozenset(("named_parameters", "state_dict"))
_LISTS = _BY_NAME | {"parameters", "named_buffers", "named_modules"}
_NOT_READ = (*("on_load_checkpoint", "on_exception", "on_gpu", "on_before_batch_transfer", "on_after_batch_transfer"),)
_WRITERS = frozenset(("save", "dump", "dumps", "save_file"))
_LIBRARIES = ("builtins", METRICS, "transformers")
_KNOWN = frozenset((*dir(pl.Trainer), *dir(pl.LightningModule)))
_NONE: Any = object()


class KeptByName:
    """The dictionaries of a run, which hooks that read them find whole.

    Args:
        module: the user's module, cut.
        trainer: of the run.
        presence: of the module's weights.
        group: the stages of this replica.
    """

    def __init__(
        self, module: pl.LightningModule, trainer: pl.Trainer, presence: Presence, group: dist.ProcessGroup
    ) -> None:
        self._module, self._group, self._by_name = module, group, ByName(presence, group)
        self._replaced, self._inside = Replacements(), False
        callbacks = foreign_callbacks(callbacks_of(trainer))
        self._owners: list[Any] = [module, *callbacks]
        self._kept = kept = {
            name for owner in self._owners for each in _holders(owner).values() for name in _kept(each)
        }
        for owner, parent in ((module, None), *((callback, Callback) for callback in callbacks)) if kept else ():
            for hook in _hooks(owner, parent):
                functions = _functions(owner, hook)
                used = {name for function in functions for name in names_in(function.__code__)}
                lists = not used.isdisjoint(_LISTS - {hook})
                if lists:
                    _refuse_written(hook, functions, kept)
                elif not used.isdisjoint(kept):
                    self._replaced.call(owner, hook, self._seeing_all(getattr(owner, hook), kept & used))

    def settle(self) -> None:
        """Renew old entries at the end of training, as code after a run reads them; collective over the stages."""
        if self._kept:
            self._fill(self._tables(self._kept), adds=False)

    def remove(self) -> None:
        """Give hooks back."""
        self._replaced.take_back()

    def _seeing_all(self, hook: Callable[..., Any], kept: set[str]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def seeing(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return hook(*args, **kwargs)
            self._inside = True
            try:
                before = self._fill(self._tables(kept))
                result = hook(*args, **kwargs)
                self._put_back(before)
                return result
            finally:
                self._inside = False

        return seeing

    def _fill(self, found: Iterator[tuple[str, Table]], *, adds: bool = True) -> list[tuple[Table, Table]]:
        """Put what other stages have told into dictionaries; of each, what was there before of what is not kept."""
        tables = dict(found)
        forms = self._by_name.forms(tables)
        here = [place for place in tables if place in forms]
        told = objects.gather({p: self._by_name.own(forms[p], tables[p]) for p in here}, self._group) if forms else []
        before = []
        for place in here:
            others = {key: entry for each in told for key, entry in each.get(place, {}).items()}
            before.append((tables[place], self._put(tables[place], forms[place], others, adds)))
        return before

    def _put_back(self, before: list[tuple[Table, Table]]) -> None:
        for table, lost in before:
            for key, value in lost.items():
                if value is _NONE:
                    table.pop(key, None)
                elif key in table:
                    table[key] = value

    def _tables(self, kept: Collection[str]) -> Iterator[tuple[str, Table]]:
        """The dictionaries under some names, each where all stages have it."""
        for number, owner in enumerate(self._owners):
            start = type(owner).__name__ + f" ({number})" * bool(number)
            for attribute, holder in _holders(owner).items():
                for name in sorted(kept):
                    if isinstance(found := vars(holder).get(name), dict):
                        yield ".".join(filter(None, (start, attribute, name))), found

    def _put(self, table: Table, form: KeyForm, told: dict[str, ToldEntry], adds: bool) -> Table:
        """Renew entries, and add others, in the order of one process; what was there before that is not written to."""
        before: Table = {}
        for key, entry in told.items():
            if self._by_name.is_here(form, key):
                continue
            old, value = table.get(key, _NONE), entry.here(self._module.device)
            if type(old) is Tensor and isinstance(value, Tensor) and old.shape == value.shape:
                with torch.no_grad():
                    old.copy_(value)
            elif adds or key in table:
                before[key], table[key] = old, value
        if before:
            ordered = self._by_name.ordered(form, table.items())
            table.clear()
            table.update(ordered)
        return before


def _hooks(owner: Any, parent: type | None) -> list[str]:
    names = [name for name in dir(parent or pl.LightningModule) if name.startswith("on_") and name not in _NOT_READ]
    names += ["state_dict"] if parent is not None else []
    return [name for name in names if is_overridden(name, owner, parent=parent)]


def _holders(owner: Any) -> dict[str, Any]:
    """A module or callback, and objects of the user's own classes in its attributes, by the names of these."""
    values = {**vars(owner), **vars(owner).get("_modules", {})}
    values = {name: value for name, value in values.items() if hasattr(value, "__dict__")}
    found = {name: value for name, value in values.items() if is_users(type(value), *_LIBRARIES)}
    plain = (name for name, value in found.items() if isinstance(value, nn.Module) or not callable(value))
    return {"": owner, **{name: found[name] for name in sorted(plain) if not isinstance(found[name], Callback)}}


def _methods(holder: Any) -> list[str]:
    kinds = [kind for kind in type(holder).__mro__ if is_users(kind, *_LIBRARIES)]
    return [name for kind in kinds for name, value in vars(kind).items() if isinstance(value, types.FunctionType)]


def _functions(owner: Any, hook: str) -> list[types.FunctionType]:
    """The functions of a hook, and those of objects in attributes of its owner, where it names both."""
    found = functions_of(owner, hook)
    names = {name for function in found for name in names_in(function.__code__)}
    for attribute, holder in _holders(owner).items():
        if attribute in names:
            found += [each for method in _methods(holder) if method in names for each in functions_of(holder, method)]
    return found


def _kept(holder: Any) -> set[str]:
    """Attributes in code that lists weights by name, which may keep something of each."""
    found: set[str] = set()
    for method in dict.fromkeys(_methods(holder)):
        functions = functions_of(holder, method)
        if any(not _BY_NAME.isdisjoint(names_in(function.__code__)) for function in functions):
            found |= {name for function in functions for name in _attributes_of_arguments(function)}
    return {name for name in found - _KNOWN if not callable(getattr(type(holder), name, None))}


def _attributes_of_arguments(function: types.FunctionType) -> Iterator[str]:
    definition, arguments = definition_of(function), function.__code__.co_varnames[: function.__code__.co_argcount]
    for node in ast.walk(definition) if definition is not None else ():
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in arguments:
            yield node.attr


def _refuse_written(hook: str, functions: list[types.FunctionType], kept: set[str]) -> None:
    """Refuse a hook that updates what a stage has, and in the same call writes all of it into a file.

    Raises:
        RuntimeError: it does.
    """
    for function in functions:
        definition = definition_of(function)
        for call in ast.walk(definition) if definition is not None else ():
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _WRITERS:
                written = [a.attr for a in call.args if isinstance(a, ast.Attribute) and a.attr in kept]
                if written:
                    line = function.__code__.co_firstlineno + call.lineno - 1
                    raise RuntimeError(
                        f"`{hook}` goes over weights and writes `{written[0]}` into a file "
                        f"({function.__code__.co_filename}:{line}), but under a pipeline a stage has the entries of "
                        "its own weights there, and old ones of others. Write it in a hook that does not go over "
                        "weights, where all entries are known, or put it into the checkpoint in `on_save_checkpoint`; "
                        "or use `pipeline_parallel_size=1`."
                    )
