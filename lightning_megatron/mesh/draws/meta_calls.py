"""Modes of torch that see what code does on the meta device.

A constructor fills its tensors by operators, which a dispatch mode sees; but it also makes tensors of Python's numbers,
and calls initialisers that return at once on the meta device. A function mode sees these.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that make tensors from Python's numbers, without any call that a mode sees."""

_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_LEFT_OUT = {
    function.__code__: (function, tuple(inspect.signature(function).parameters)[1:])
    for function in (init._no_grad_trunc_normal_, init.orthogonal_, init.sparse_, init.dirac_)
}
"""Initialisers that do nothing on the meta device, by their code, with the names of their options."""


class Notes(Protocol):
    """Takes note of calls; see :class:`.construction.Construction`."""

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note a call that has run."""

    def note_whole(self, function: Any, options: Sequence[str], given: Mapping[str, Any]) -> None:
        """Note a call of one of torch's initialisers, which has left out what it does."""

    def catch_up(self) -> None:
        """Draw what was noted on the meta device from torch's generator, before another call draws from it."""


def draws(function: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in function.tags


class MetaOperators(TorchDispatchMode):
    """Tells of calls on the meta device, operator by operator.

    Args:
        construction: takes note.
    """

    def __init__(self, construction: Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._construction = construction

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor | torch.device)]
        on_meta = any(leaf.is_meta if isinstance(leaf, Tensor) else leaf.type == "meta" for leaf in leaves)
        if not on_meta and draws(func):
            self._construction.catch_up()
        output = func(*args, **kwargs)
        plain = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if on_meta and all(type(leaf) in plain for leaf in leaves if isinstance(leaf, Tensor)):
            self._construction.note(func, tuple(args), kwargs, output)
        return output


class MetaFunctions(TorchFunctionMode):
    """Notes what no operator tells of.

    Numbers of Python's, which become a tensor on the meta device, go through the CPU. Initialisers of torch's that
    look at what they have drawn return at once on the meta device; they are noted as one call.

    Args:
        construction: takes note.
    """

    def __init__(self, construction: Notes) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_META and func(*args):
            asks: Any = sys._getframe(1)
            while asks.f_code.co_name == "__torch_function__":  # of modes inside of this one, such as `torch.device`
                asks = asks.f_back
            if asks.f_code in _LEFT_OUT:
                self._construction.note_whole(*_LEFT_OUT[asks.f_code], asks.f_locals)
        device = kwargs.get("device")
        if func not in _FROM_DATA or device is None or torch.device(device).type != "meta":
            return func(*args, **kwargs)
        if isinstance(args[0] if args else None, Tensor):
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": torch.device("cpu")}).to("meta")
