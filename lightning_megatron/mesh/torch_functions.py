"""Functions as torch is given them: its own, by attribute, by name, and whether they write; users', and their lines;
and operators as they run.

``__torch_function__`` is given torch's. ``Function.apply`` asks a tensor nothing, and is often taken once, ``reverse =
GradientReversal.apply`` at the top of a file, so that a method put in its place would be passed by. But it asks the
class below for its own ``apply``, at each call: there one can stand.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from lightning_megatron.mesh.parts.packages import PACKAGE, comes_from, is_users, runs_for_users
from lightning_megatron.mesh.replaced import Replacements

_BETWEEN = ("contextlib", "functools", "importlib")  # call code of others


def line_of_user(frame: FrameType | None = None) -> str:
    """The innermost line of the user's code that runs, as ``file:line``.

    Args:
        frame: where to look from; the caller's by default.
    """
    return line_of_frame(frame_of_user(frame or sys._getframe(1)))


def frame_of_user(frame: FrameType | None = None) -> FrameType:
    """The innermost frame of the user's code that runs.

    Args:
        frame: where to look from; the caller's by default.
    """
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and not runs_for_users(frame, _BETWEEN):
        frame = frame.f_back
    return frame


def frame_of_caller(frame: FrameType | None = None) -> FrameType:
    """The innermost frame that is not this package's: of the user, or of a library that checks what it is given.

    Args:
        frame: where to look from; the caller's by default.
    """
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and comes_from(frame, PACKAGE, *_BETWEEN):
        frame = frame.f_back
    return frame


def line_of_frame(frame: FrameType) -> str:
    """The line that a frame is at, as ``file:line``."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of_error(error: BaseException) -> str:
    """The innermost line of the user's code that an error came by, as ``file:line``; "" for none."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_users(frame, *_BETWEEN)]
    return f"{frames[-1][0].f_code.co_filename}:{frames[-1][1]}" if frames else ""


def lines_of_step() -> str:
    """The user's lines from a step down to what runs, as ``file:line → line``; "" outside of one."""
    frame: FrameType | None = sys._getframe(1)
    calls: list[tuple[str, int]] = []
    while frame is not None and not comes_from(frame, "lightning"):
        if is_users(frame, *_BETWEEN):
            calls.insert(0, (frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    files = ["", *(file for file, _ in calls)]
    return " → ".join(
        str(line) if file == before else f"{file}:{line}" for (file, line), before in zip(calls, files, strict=False)
    )


def getters(*names: str) -> list[Any]:
    """The functions that ``__torch_function__`` is given where these attributes are read."""
    return [getattr(Tensor, name).__get__ for name in names]


def setters(*names: str) -> list[Any]:
    """The same where these attributes are written."""
    return [getattr(Tensor, name).__set__ for name in names]


METADATA = {
    *getters("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_meta", "is_quantized"),
    *getters("_backward_hooks"),
    *setters("_backward_hooks"),
    *getters("is_nested", "is_mkldnn", "_version", "output_nr", "itemsize", "nbytes", "is_cpu"),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.stride, Tensor.is_contiguous),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.get_device),
    *(Tensor.__len__, Tensor.__hash__),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
"""What torch is asked of a tensor without a look at its numbers."""


def is_in_place(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch changes its first argument, by its name or an option of this call."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED or kwargs.get("inplace") is True


def by_place(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A call with the tensor that it writes as first argument, which functions of ``nn.init`` give by name."""
    if args or not kwargs or not is_in_place(func, kwargs):
        return func, args, dict(kwargs)
    name, *others = kwargs

    @functools.wraps(func)
    def placed(value: Any, **options: Any) -> Any:
        return func(**{name: value}, **options)

    return placed, (kwargs[name],), {other: kwargs[other] for other in others}


def name_of(func: Any) -> str:
    """Name of a function, or of the attribute that it reads or writes."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name in ("__get__", "__set__") else name


_AUGMENTED = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__imod__"}
_AUGMENTED |= {"__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}


Around = Callable[[type[Function], Callable[..., Any], tuple[Any, ...]], Any]
"""``around(cls, call, args)``: what ``cls.apply(*args)`` returns; ``call`` makes the call."""

_BELOW: Any = Function.__base__


def around_functions(replaced: Replacements, around: Around) -> None:
    """Let every call of a function lead through ``around``, until what is replaced is taken back.

    Args:
        replaced: by whom.
        around: called instead; several may stand around each other, the latest outermost.
    """
    before = vars(_BELOW).get("apply")

    def apply(cls: type[Function], *args: Any) -> Any:
        call = super(_BELOW, cls).apply if before is None else functools.partial(before.__func__, cls)
        return around(cls, call, args)

    replaced.put(_BELOW, "apply", classmethod(apply))


def is_users_function(cls: type[Function]) -> bool:
    """Whether a function is neither torch's nor this package's; those under ``torch.func``'s transforms are."""
    return is_users(cls) or cls.__name__.endswith("Generated")


def subclasses_of(kind: Any) -> list[Any]:
    """All subclasses of a class that this process knows."""
    found: list[Any] = []
    for each in kind.__subclasses__():
        found += [each, *subclasses_of(each)]
    return found


Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""``run(func, args, kwargs)`` runs an operator."""


class OperatorWatch:
    """Sees each operator of torch while it is active, and may change what it is given and gives.

    Those inside of one another share a ``TorchDispatchMode``: the way to one, through C++ and Dynamo's guard, takes an
    operator longer than what most of them do. What one of them computes itself is seen by none of them::

        with outer, inner:
            a + b               inner.seen(run, add, (a, b), {})   whose run is   outer.seen(...)   whose run is   add
    """

    def seen(self, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operator: that of ``run(func, args, kwargs)``, or another."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        mode = _get_current_dispatch_mode()
        if not isinstance(mode, _Watched):
            mode = _Watched()
            mode.__enter__()  # type: ignore[no-untyped-call]
        mode.runs.append(functools.partial(self.seen, mode.runs[-1]))
        return self

    def __exit__(self, *error: Any) -> None:
        mode = _get_current_dispatch_mode()
        assert isinstance(mode, _Watched), "left in another order than entered"
        mode.runs.pop()
        if len(mode.runs) == 1:
            mode.__exit__(*error)  # type: ignore[no-untyped-call]


class _Watched(TorchDispatchMode):
    """The mode of some watches; the latest one's run stands last."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.runs: list[Run] = [lambda func, args, kwargs: func(*args, **kwargs)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.runs[-1](func, args, kwargs or {})
