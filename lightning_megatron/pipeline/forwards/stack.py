"""Stacks the wrappers around a module's ``forward`` in a fixed order, whatever the order of their installation.

Cutting, profiling, pieces of tokens, activations in host memory, recomputation, gathering of weights, compilation,
split backwards and 8-bit products each run code around, or instead of, a module's own ``forward``. Each is installed
and removed independently: a split backward per micro-batch, the profile after a few steps, the others from run to run.
Each has a slot, and slots nest in the order of their declaration::

    module(x) ─▶ PIPELINE ─▶ PROFILE ─▶ PIECES ─▶ HOST ─▶ RECOMPUTE ─▶ WEIGHTS ─▶ COMPILE ─▶ SPLIT ─▶ PRODUCTS ─▶ own

``module.forward`` is the outermost wrapper and each wrapper's ``forward`` is the next one, so a call costs one Python
call per wrapper. Only the stack assigns to ``module.forward``. The innermost forward is the one that the module had
before the first wrapper, even if the user or a library had assigned it to the instance.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn


class ForwardSlot(enum.IntEnum):
    """Purpose of a wrapper, outermost first.

    ``HOST`` is outside of ``RECOMPUTE``, which decides what is kept: of that, all goes to the host.

    ``SPLIT`` is outside of ``PRODUCTS``: a linear whose backward is split computes the products itself, in the
    precision of ``PRODUCTS``, and calls the next forward if it cannot split.
    """

    PIPELINE = 0
    PROFILE = 1
    PIECES = 2
    HOST = 3
    RECOMPUTE = 4
    WEIGHTS = 5
    COMPILE = 6
    SPLIT = 7
    PRODUCTS = 8


_SLOTS = len(ForwardSlot)


class Wrapper:
    """Runs around one module's ``forward``; subclasses define ``__call__``.

    Args:
        module: the module whose forward it wraps.

    Attributes:
        slot: its slot in the stack.
        forward: the next wrapper, or the module's own forward; set by the stack.
        stack: the stack it is in; set by the stack.
    """

    slot: ClassVar[ForwardSlot]
    forward: Callable[..., Any]
    stack: ForwardStack

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of ``module.forward``."""
        raise NotImplementedError

    @property
    def __signature__(self) -> inspect.Signature:
        """Signature of the module's own forward, for code that inspects it before passing an argument."""
        return inspect.signature(self.forward)

    def install(self) -> None:
        """Put this wrapper into its slot, replacing an earlier one."""
        ForwardStack.of(self.module).put(self)


class ForwardStack:
    """The wrappers around one module's ``forward``, at most one per slot.

    Invariant: ``module.forward`` is the outermost wrapper, and each calls the next one inwards, in the order of
    :class:`ForwardSlot`; without wrappers it is the module's own. Only the wrappers reference the stack, so it is
    copied and pickled with its module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._wrappers: list[Wrapper | None] = [None] * _SLOTS
        self._own: Any = None  # the forward before the first wrapper; None while there is no wrapper
        self._own_is_attribute = False

    @classmethod
    def of(cls, module: nn.Module) -> ForwardStack:
        """The stack of ``module``; an empty one where nothing is wrapped."""
        outermost = module.__dict__.get("forward")
        if isinstance(outermost, Wrapper) and outermost.module is module:
            return outermost.stack
        return cls(module)

    @property
    def own(self) -> Any:
        """The module's own forward, below all wrappers."""
        return self._module.forward if self._own is None else self._own

    @property
    def runs_class_forward(self) -> bool:
        """Whether :attr:`own` is the method of the module's class, not a function assigned to this instance."""
        own, module = self.own, self._module
        return getattr(own, "__self__", None) is module and own.__func__ is type(module).forward

    def get(self, slot: ForwardSlot) -> Wrapper | None:
        """The wrapper in a slot, or ``None``."""
        return self._wrappers[slot]

    def put(self, wrapper: Wrapper) -> None:
        """Put a wrapper into its slot, replacing an earlier one."""
        if self._own is None:
            self._own, self._own_is_attribute = self._module.forward, "forward" in self._module.__dict__
        self._wrappers[wrapper.slot] = wrapper
        self._link()

    def remove(self, slot: ForwardSlot) -> None:
        """Empty a slot; without its last wrapper, the module has its own ``forward`` again, as before."""
        if self._wrappers[slot] is not None:
            self._wrappers[slot] = None
            self._link()

    def _link(self) -> None:
        call, attributes = self._own, self._module.__dict__
        for wrapper in reversed(self._wrappers):
            if wrapper is not None:
                wrapper.forward, wrapper.stack = call, self
                call = wrapper
        if call is not self._own:
            attributes["forward"] = call
            return
        if self._own_is_attribute:
            attributes["forward"] = self._own
        else:
            del attributes["forward"]
        self._own = None
