"""Weights and buffers of other stages, as code outside of a step sees them.

Hooks reach into layers by name: ``self.layers[1].out.weight.clamp_(-1, 1)``. On a stage that does not own the layer
there is no number to read and nothing to write, only zeros of the right shape for the steps to run over. So outside of
a step such a tensor answers what it knows and no more::

    shape, dtype, device, len()          as they are
    in-place writes, .data = ...         nothing: the owning stage does the same to the real one
    arithmetic                           a result that is absent too
    .item(), float(), if, print          an error that names the part, instead of a zero
    writing it into a tensor that is here                 likewise

A logged value that is absent here is taken from the stage that has it (``strategy.logs.hook_logs``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_KNOWN = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "is_inference", "is_contiguous", "is_pinned", "is_shared"),
        *("__len__", "__hash__", "is_same_size", "is_conj", "is_neg", "is_set_to", "data_ptr", "result_type"),
        "untyped_storage",
    )
)
_TENSOR_ATTRIBUTES = frozenset(("data", "grad", "T", "mT", "H", "mH", "real", "imag"))
_WRITES = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__"))


class Absent(Tensor):
    """Zeros in the place of a tensor that another stage owns.

    Attributes:
        part: dotted name of what it belongs to.
        plain: the zeros.
        is_running: whether a step or a backward runs, in which it is just zeros.
    """

    part: str
    plain: Tensor
    is_running: Callable[[], bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        direct = nested = None
        for argument in args:  # the usual case in a step first: ``x + self.positions``
            if argument.__class__ is Absent:
                direct = argument
            elif argument.__class__ is list or argument.__class__ is tuple:
                nested = argument
        if direct is not None and nested is None and not kwargs and direct.is_running():
            if args[0].__class__ is Absent and _writes(func.__name__):  # the owning stage runs the same line
                return args[0]
            return func(*[argument.plain if argument.__class__ is Absent else argument for argument in args])
        kwargs = kwargs or {}
        first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Absent))
        if first.is_running():
            return func(*_plain(args), **_plain(kwargs))
        name = getattr(func, "__name__", "")
        attribute = func.__self__.__name__ if name in ("__get__", "__set__") else ""
        if name in _KNOWN or (name == "__get__" and attribute not in _TENSOR_ATTRIBUTES):
            return func(*_plain(args), **_plain(kwargs))
        if name in ("__repr__", "__str__"):
            return f"<tensor of `{first.part}` on another pipeline stage>"
        if name == "__deepcopy__":
            return first
        if name == "__set__" or _writes(name):
            target = args[0] if args else next(iter(kwargs.values()))
            absent = all(isinstance(leaf, Absent) for leaf in pytree.tree_leaves(target))
            return target if absent else first.refuse(f"written into another tensor by `{name}`")
        return first._result(func, attribute or name, args, kwargs)

    def _result(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What an operation gives: absent tensors, never a number."""
        if name == "grad":
            return self
        if isinstance(kwargs.get("out"), Tensor):
            self.refuse(f"written by `{name}`")
        with torch.no_grad():
            output = func(*_plain(args), **_plain(kwargs))
        leaves = pytree.tree_leaves(output)
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            self.refuse(f"read by `{name}`")
        return pytree.tree_map(lambda tensor: make_absent(tensor, self.part, self.is_running), output)

    def refuse(self, what: str) -> Any:
        """Raise the error that says why there is no number.

        Raises:
            RuntimeError: always.
        """
        part = self.part
        raise RuntimeError(
            f"a value that depends on `{part}` was {what} outside of a step, but `{part}` is on another pipeline "
            "stage. Go over `self.named_parameters()`, which gives what this rank holds; get the whole model's "
            "weights by `strategy.full_state_dict()`; or use `pipeline_parallel_size=1`."
        )


def _writes(name: str) -> bool:
    """Whether an operation of this name writes into its first argument."""
    return name in _WRITES or (name[-1:] == "_" and name[-2:] != "__")


def make_absent(zeros: Tensor, part: str, is_running: Callable[[], bool]) -> Absent:
    """``zeros`` as a tensor that is absent outside of steps; shares its memory and its place in the graph."""
    absent = zeros.as_subclass(Absent)
    absent.part, absent.plain, absent.is_running = part, zeros, is_running
    return absent


def _plain(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.plain if isinstance(leaf, Absent) else leaf, value)
