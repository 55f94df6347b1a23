"""Copies of a user's module that share no writable state with it, so that trials have no side effects.

A plan is made by running the user's code on tiny inputs. That code keeps state: data-dependent initialisation,
counters, caches, running statistics. Every trial therefore runs on a copy, and nothing has to be restored. A copy of a
large module is cheap: tensors share their memory with the original until one of the two is written to (copy-on-write),
and only the Python objects around them are copied at once.

State outside of the module is not copied: a list or a cache of a Python module, a file.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

_NOT_OWNED = ("_trainer", "_fabric")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_DATA = (DataLoader, Dataset)
_FLAGS = frozenset((bool, int, float, str, type(None)))
_TABLES = (dict, OrderedDict)
_PLAIN = (bool, int, float, str, bytes, type(None), type, Tensor, nn.Module)


def copy_of(module: nn.Module, replacements: Mapping[int, Any] | None = None) -> nn.Module:
    """A copy of a module that can be run, trained and changed without changing the original.

    Tensors, attributes, containers, and the closures and default arguments of functions in attributes are copied;
    references within the module become references within the copy. Objects that the module does not own (trainer, data)
    and attributes that Python cannot copy (locks, process groups) are shared with the original.

    Args:
        module: the module to copy.
        replacements: id of an object in it -> the object to use in its place in the copy.

    Returns:
        The copy; its tensors share memory with the original until one of the two is written to.
    """
    parts = _with_owners_of_hooks(module)
    memo: dict[int, Any] = {id(owner): owner for owner in _not_owned(parts)}
    memo |= _tensors(parts) | _empty_tables(parts)
    functions = _Functions(_functions([value for part in parts for value in vars(part).values() if _may_hold(value)]))
    memo |= functions.twins | dict(replacements or {})
    try:
        copied = copy.deepcopy(module, attempt := dict(memo))
    except Exception:  # some attribute cannot be copied; copying each separately shows which
        attempt = memo | _uncopyable(parts, memo)
        copied = copy.deepcopy(module, attempt)
    functions.fill(attempt)
    originals = [*parts, *attempt.get(id(attempt), ())]  # what `deepcopy` has met, such as a module in a list
    for part in originals:
        if isinstance(part, nn.Module) and id(part) in attempt:
            _share(part, attempt[id(part)])  # a LightningModule drops its trainer where it is copied
    return copied


def _with_owners_of_hooks(module: nn.Module) -> list[nn.Module]:
    """All modules in a module, and those whose methods are hooks of these, with all in them."""
    found: dict[int, nn.Module] = {}
    waiting = [module]
    while waiting:
        for part in waiting.pop().modules():
            if id(part) in found:
                continue
            found[id(part)] = part
            hooks = [hook for key, table in vars(part).items() if key in _HOOKS for hook in table.values()]
            waiting += [hook.__self__ for hook in hooks if isinstance(getattr(hook, "__self__", None), nn.Module)]
    return list(found.values())


def _share(part: nn.Module, copied: nn.Module) -> None:
    """Give a copy the trainer of its original; what it logs there is no log of the run."""
    for key in _NOT_OWNED:
        if vars(part).get(key) is not None and copied is not part:
            vars(copied).update({key: vars(part)[key], "log": _log_nothing})


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _not_owned(parts: Iterable[nn.Module]) -> Iterator[Any]:
    for part in parts:
        for key, value in vars(part).items():
            if (key in _NOT_OWNED and value is not None) or isinstance(value, _DATA):
                yield value


def _tensors(parts: Iterable[nn.Module]) -> dict[int, Any]:
    """By id, a copy of every tensor in attributes of these modules; tensors that share a storage still share one."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Any] = {}
    for part in parts:
        for leaf in tree_leaves([value for value in vars(part).values() if _may_hold(value)]):
            if isinstance(leaf, Tensor) and id(leaf) not in copies and (twin := _tensor(leaf, storages)) is not None:
                copies[id(leaf)] = twin
    return copies


def _empty_tables(parts: Iterable[nn.Module]) -> dict[int, Any]:
    """By id, a twin of every empty table of hooks: a module has ten, which `deepcopy` would take longest for."""
    values = [value for part in parts for value in vars(part).values() if type(value) is OrderedDict and not value]
    return {id(value): OrderedDict() for value in values}


def _may_hold(value: Any) -> bool:
    """Whether tensors may be in an attribute; in most there are none: flags, and tables of hooks that are empty."""
    return type(value) not in _FLAGS and (type(value) not in _TABLES or bool(value))


def _tensor(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor | None:
    """A copy of one tensor; None where its own way of being copied is the only one."""
    twin: Tensor
    if isinstance(tensor, FakeTensor):  # there are no values to share
        twin = tensor.detach()
        return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.device.type == "meta":
        if tensor.is_leaf:
            return None
        return tensor.detach()  # a result of an earlier forward, which `deepcopy` refuses
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad and tensor.is_leaf)
    data = _on(_shared_until_written(tensor, storages), tensor)
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(data, tensor.requires_grad)
    else:
        twin = data.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    vars(twin).update(vars(tensor))
    return twin


def _shared_until_written(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
    """A storage with the same values that shares the memory of the tensor until either is written to."""
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        try:
            lazy = torch._lazy_clone(whole)
        except RuntimeError:  # memory that torch does not own: a NumPy array, shared memory, a mapped file
            lazy = whole.clone()
        storages[storage._cdata] = lazy.untyped_storage()
    return storages[storage._cdata]


def _on(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def _functions(values: Iterable[Any]) -> Iterator[FunctionType]:
    """Functions with closures or defaults, among these values, in their containers, and in what such functions hold."""
    waiting, seen = list(values), set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set)):
            waiting += value
        elif isinstance(value, MethodType):
            waiting.append(value.__func__)
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, FunctionType):
            held = _held(value)
            if held:
                yield value
            waiting += held


def _held(function: FunctionType) -> list[Any]:
    """Contents of a function's closure, and its default arguments."""
    cells = [_content(cell) for cell in function.__closure__ or ()]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has not been given a value yet
        return None


class _Functions:
    """Copies of functions, created before the copy of the module, so that it can refer to them, and filled later."""

    def __init__(self, functions: Iterable[FunctionType]) -> None:
        self._originals = {id(function): function for function in functions}
        self._cells: dict[int, tuple[CellType, CellType]] = {}
        self.twins = {key: self._twin(function) for key, function in self._originals.items()}

    def fill(self, memo: dict[int, Any]) -> None:
        """Fill closures and defaults with copies of the originals', using the memo of the module's copy."""
        for old, new in self._cells.values():
            if (content := _content(old)) is not None:
                new.cell_contents = _copied(content, memo)
        for key, twin in self.twins.items():
            values, named = self._originals[key].__defaults__, self._originals[key].__kwdefaults__
            twin.__defaults__ = None if values is None else tuple(_copied(x, memo) for x in values)
            twin.__kwdefaults__ = None if named is None else {name: _copied(x, memo) for name, x in named.items()}

    def _twin(self, function: FunctionType) -> FunctionType:
        closure = tuple(
            self._cells.setdefault(id(cell), (cell, CellType(None)))[1] for cell in function.__closure__ or ()
        )
        twin = FunctionType(function.__code__, function.__globals__, function.__name__, None, closure or None)
        twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
        vars(twin).update(vars(function))
        return twin


def _uncopyable(parts: Iterable[nn.Module], memo: Mapping[int, Any]) -> dict[int, Any]:
    """Attributes of these modules that Python cannot copy, by id; the copy shares them with the original."""
    known = {**memo, **{id(part): part for part in parts}}
    values = [value for part in parts for value in vars(part).values() if not isinstance(value, _PLAIN)]
    return {id(value): value for value in values if _copied(value, dict(known)) is value}


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of the value, or the value itself if Python cannot copy it."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value
