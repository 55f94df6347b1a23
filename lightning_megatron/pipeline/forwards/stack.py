"""Every wrapper around a module's ``forward``, in an order that does not depend on who came first.

Cutting, profiling, recomputation, compilation, split backwards and 8-bit products each run code around, or instead of,
a module's own ``forward``, and each comes and goes on its own: a split backward by the micro-batch, the profile after
a few steps, the others from one run to the next. Each has a slot, and slots are nested as they are declared::

    module(x) ─▶ PIPELINE ─▶ PROFILE ─▶ RECOMPUTE ─▶ COMPILE ─▶ SPLIT ─▶ PRODUCTS ─▶ the module's own forward

``module.forward`` is the outermost wrapper itself and each wrapper's ``forward`` is the next one, so a call costs one
Python call per wrapper. The stack links them; nobody else assigns to ``forward``. At the bottom is whatever
``module.forward`` was before the first wrapper came, also where the user, or a library, had put a function of its own
there.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn


class ForwardSlot(enum.IntEnum):
    """What a wrapper is for, outermost first.

    ``SPLIT`` is outside of ``PRODUCTS``: a linear whose backward is split multiplies by itself, with the products it
    is asked for, and falls back to the forward below where it cannot split.
    """

    PIPELINE = 0
    PROFILE = 1
    RECOMPUTE = 2
    COMPILE = 3
    SPLIT = 4
    PRODUCTS = 5


_SLOTS = len(ForwardSlot)


class Wrapper:
    """Runs around one module's ``forward``; subclasses define ``__call__``.

    Args:
        module: whose forward.

    Attributes:
        slot: where it stands in the stack.
        forward: what it wraps; set by the stack, as is ``stack``.
    """

    slot: ClassVar[ForwardSlot]
    forward: Callable[..., Any]
    stack: ForwardStack

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``module.forward``."""
        raise NotImplementedError

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the module's own forward, as code may look for an argument before it passes one."""
        return inspect.signature(self.forward)

    def install(self) -> None:
        """Take the slot, in place of an earlier wrapper there."""
        ForwardStack.of(self.module).put(self)


class ForwardStack:
    """The wrappers around one module's ``forward``, at most one per slot.

    Copied or pickled with its module, as it is reached through the wrappers only.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._wrappers: list[Wrapper | None] = [None] * _SLOTS
        self._own: Any = None  # what was there before the first wrapper, as long as there is one
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
        """Whether that is the method of the module's class, rather than a function put on this instance."""
        own, module = self.own, self._module
        return getattr(own, "__self__", None) is module and own.__func__ is type(module).forward

    def get(self, slot: ForwardSlot) -> Wrapper | None:
        """The wrapper in a slot."""
        return self._wrappers[slot]

    def put(self, wrapper: Wrapper) -> None:
        """Fill ``wrapper.slot``, in place of an earlier wrapper there."""
        if self._own is None:
            self._own, self._own_is_attribute = self._module.forward, "forward" in self._module.__dict__
        self._wrappers[wrapper.slot] = wrapper
        self._link()

    def remove(self, slot: ForwardSlot) -> None:
        """Empty a slot; with the last wrapper, ``module.forward`` is again what it was, instance attribute or not."""
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
