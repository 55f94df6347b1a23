"""Tells of torch functions that may read some tensors, such as weights that are used without a call of their layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_VIEWS = ("data", "T", "mT", "H", "mH", "real", "imag")
_SIZES = (
    "numel",
    "nelement",
    "size",
    "dim",
    "ndimension",
    "__len__",
    "element_size",
    "is_floating_point",
    "is_complex",
)


class ReportedUses(TorchFunctionMode):
    """Reports every torch function that may read or replace values of one of some tensors, among its arguments.

    Args:
        ids: of the tensors, which live as long as this.
        used: called with the tensor, before the function.
    """

    def __init__(self, ids: Container[int], used: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._ids, self._used = ids, used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, ids = kwargs or {}, self._ids
        for value in (*args, *kwargs.values()) if kwargs else args:
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if id(each) in ids and _reads_values(func):
                    self._used(each)
        return func(*args, **kwargs)


class Watch:
    """Reports the first use of a parameter, as :class:`ReportedUses` does, without a call for any other function.

    Watched parameters are of a class of their own, which torch asks before it calls a function with one of them.

    Args:
        used: called with the parameter, before the function.
    """

    def __init__(self, used: Callable[[nn.Parameter], None]) -> None:
        self._kind = _watched_kind(self, used)

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch parameters, as far as they can be."""
        for parameter in parameters:
            if is_watchable(parameter):
                parameter.__class__ = self._kind

    def watches(self, parameter: nn.Parameter) -> bool:
        """Whether no use of a parameter has been reported since it was watched."""
        return type(parameter) is self._kind

    def end(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch them no longer."""
        for parameter in parameters:
            if self.watches(parameter):
                parameter.__class__ = nn.Parameter


def is_watchable(parameter: nn.Parameter) -> bool:
    """Whether a parameter can be watched: those of other classes torch asks for reasons of their own."""
    return type(parameter) is nn.Parameter


def _watched_kind(watch: Watch, used: Callable[[nn.Parameter], None]) -> type[nn.Parameter]:
    class Watched(nn.Parameter):
        """A parameter of which the next use is reported."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            for value in (*args, *kwargs.values()) if _reads_values(func) else ():
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    if type(each) is cls:
                        watch.end([each])
                        used(each)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

        def __deepcopy__(self, memo: Any) -> nn.Parameter:
            watch.end([self])
            used(self)
            return copy.deepcopy(self, memo)

    return Watched


def _reads_values(func: Any) -> bool:
    """Whether a call may read or replace values: false if it asks for a size, or an attribute such as ``grad``."""
    name = getattr(func, "__name__", "")
    if name in _SIZES:
        return False
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in _VIEWS
    return True
