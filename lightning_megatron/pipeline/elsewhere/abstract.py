"""Learning the shapes of what a forward returns without computing it, and without leaving a trace.

The forward of a part that lives on another stage is run on fake tensors. User code remembers things: a rotary table
computed at the first call, a mask in a ``functools.lru_cache``. A fake tensor that stayed behind there would spoil the
parts that do compute, so whatever the run left on the modules or in a cache is taken back.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from lightning_megatron.pipeline.elsewhere.absent import Absent
from lightning_megatron.pipeline.elsewhere.away import NUMBERS, plain, unmarked
from lightning_megatron.pipeline.elsewhere.undo import unchanged

log = logging.getLogger(__name__)


class TensorShape:
    """Facts about a tensor without its numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device


class ObjectShape:
    """An object of the user's own with tensors in its attributes, such as a dataclass."""

    def __init__(self, value: Any) -> None:
        self.leaves, self._spec = _describe(vars(value))
        self._empty = copy.copy(value)
        self._empty.__dict__.clear()

    def filled(self, leaves: list[Any]) -> Any:
        """Another such object, with ``leaves`` in the places of :attr:`leaves`."""
        value = copy.copy(self._empty)
        value.__dict__.update(pytree.tree_unflatten(leaves, self._spec))
        return value


@dataclass(frozen=True)
class OfData:
    """A number in the output of a forward that looks at its data, which may depend on them.

    Attributes:
        kind: its type.
    """

    kind: type


def abstract_run(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """Leaves and pytree spec of ``forward(*args, **kwargs)``, each tensor a :class:`TensorShape`, and each number an
    :class:`OfData` where the forward looks at data.

    Args:
        module: what ``forward`` belongs to; left as it was.
        forward: its own forward.
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        ``(leaves, spec)``; ``spec`` is ``None`` where a single tensor is returned.
    """
    mode = _RecordingMode(allow_non_fake_inputs=True)
    try:
        with unmarked(), unchanged(module), warnings.catch_warnings(action="ignore"), mode, torch.no_grad():
            _put_fakes(mode, module)
            return _describe(forward(*_as_fake(mode, args), **_as_fake(mode, kwargs)))
    except Exception:
        log.debug("the shapes of %s depend on data: run once on zeros", type(module).__name__, exc_info=True)
    finally:
        _forget_fakes(mode)
    with unmarked(), unchanged(module), torch.no_grad(), torch.random.fork_rng(enabled=True):
        leaves, spec = _describe(forward(*_private_nest(args), **_private_nest(kwargs)))
    return _doubt(leaves), spec


def _doubt(leaves: list[Any]) -> list[Any]:
    """``leaves`` of a forward that looks at its data, with nothing said of numbers."""
    for leaf in leaves:
        if isinstance(leaf, ObjectShape):
            leaf.leaves = _doubt(leaf.leaves)
    return [OfData(type(leaf)) if type(leaf) in NUMBERS else leaf for leaf in leaves]


def is_fake(value: Any) -> bool:
    """Whether ``value`` is a fake tensor, which only steps of a rehearsal should ever see."""
    return isinstance(value, FakeTensor)


def is_ordinary(value: Any) -> TypeGuard[Tensor]:
    """Whether ``value`` is a tensor of no class of its own: with numbers, or without memory in a rehearsal, which does
    with it what a run does.
    """
    if isinstance(value, FakeTensor):
        return not isinstance(value.fake_mode, _RecordingMode)
    return type(value) in (Tensor, nn.Parameter)


class _RecordingMode(FakeTensorMode):
    """Knows which of the fake tensors that it made are still alive."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._made: list[weakref.ref[FakeTensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        self._made += [weakref.ref(leaf) for leaf in pytree.tree_leaves(output) if isinstance(leaf, FakeTensor)]
        return output

    def alive(self) -> list[FakeTensor]:
        """Fake tensors that are still referenced."""
        return [tensor for reference in self._made if (tensor := reference()) is not None]


def _put_fakes(mode: FakeTensorMode, module: nn.Module) -> None:
    """Give ``module`` fake tensors in the place of absent ones, until :func:`unchanged` puts these back.

    Torch takes an operation on another tensor apart in Python each time; one on fake tensors alone it remembers, for
    all runs of the process.
    """
    with mode:
        for child in module.modules():
            for name, value in child.__dict__.items():
                if isinstance(value, Absent):
                    zeros = value.plain
                    child.__dict__[name] = torch.empty(zeros.shape, dtype=zeros.dtype, device=zeros.device)


def _describe(output: Any) -> tuple[list[Any], Any]:
    if isinstance(output, Tensor):
        return [TensorShape(output)], None
    leaves, spec = pytree.tree_flatten(output)
    return [_describe_leaf(leaf) for leaf in leaves], spec


def _describe_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return TensorShape(leaf)
    kept = getattr(leaf, "__dict__", None)
    if type(kept) is dict and any(isinstance(value, Tensor) for value in pytree.tree_leaves(kept)):
        return ObjectShape(leaf)
    return leaf


def _as_fake(mode: FakeTensorMode, value: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: mode.from_tensor(plain(leaf)) if isinstance(leaf, Tensor) else _private(leaf), value
    )


def _private_nest(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: plain(leaf) if isinstance(leaf, Tensor) else _private(leaf), value)


def _private(leaf: Any) -> Any:
    """A copy, so that an abstract run cannot leave fake tensors in a shared object such as a key-value cache."""
    try:
        return copy.deepcopy(leaf)
    except Exception:
        return leaf


_NESTS = (dict, list, tuple)


def _forget_fakes(mode: _RecordingMode) -> None:
    """Remove fake tensors from what is outside of modules: ``functools`` caches and plain containers."""
    if not mode.alive():
        return
    gc.collect()
    fakes = mode.alive()
    if not fakes:
        return
    with _every_object_listed():
        for holder in gc.get_referrers(*fakes):
            if holder is fakes:
                continue
            if type(holder) is dict:
                for key in [key for key, value in holder.items() if is_fake(value)]:
                    del holder[key]
            elif type(holder) in (list, deque):
                kept = [value for value in holder if not is_fake(value)]
                holder.clear()
                holder.extend(kept)
            elif type(holder) is set:
                for value in [value for value in holder if is_fake(value)]:
                    holder.remove(value)
        for cache in gc.get_objects():
            if type(cache) is functools._lru_cache_wrapper and _keeps_fakes(cache):
                cache.cache_clear()


@contextmanager
def _every_object_listed() -> Iterator[None]:
    """``gc`` lists no frozen objects, and a process that froze what it imported froze the caches in there too."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def _keeps_fakes(cache: Any) -> bool:
    held = gc.get_referents(cache)  # the results themselves, or a table of them
    return any(is_fake(leaf) for leaf in pytree.tree_leaves([h for h in held if is_fake(h) or type(h) in _NESTS]))
