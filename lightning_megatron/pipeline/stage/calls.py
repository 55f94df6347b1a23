"""Wrappers around the forwards of a cut module's layers and parts.

A call decides nothing: it passes itself on to whatever follows the step, a :class:`Follower`, which computes it, skips
it or ends the step there.

Hooks that user code has registered on a layer belong to the stage that computes it, with its real inputs, outputs and
gradients. So a layer is met before its hooks run, at ``_call_impl``, where torch keeps them, and not only at its
``forward``::

    stage 0   layer 1: hooks, forward, hooks   layer 2: the step ends here, before any hook
    stage 1   layer 1: skipped, hooks and all  layer 2: takes what arrived; hooks, forward, hooks
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.mesh.autograd import graph_task, in_backward
from lightning_megatron.mesh.pickling import users_hook
from lightning_megatron.pipeline.elsewhere.containers import GLOBAL_HOOKS
from lightning_megatron.pipeline.elsewhere.standin import Sentinel
from lightning_megatron.pipeline.forwards.entry import Entry
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, Wrapper
from lightning_megatron.pipeline.forwards.users_checkpoints import check_checkpoint


class Follower(Protocol):
    """Follows the user's step call by call and answers each of them: the stage's cursor.

    Attributes:
        computes_parts: whether parts before the layers are called as in one process now.
        recomputes: whether the step is one of training, or a trial of one, and user code may recompute calls of it.
    """

    computes_parts: bool
    recomputes: bool

    def call_layer(self, index: int, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of trunk layer ``index``."""

    def is_inside(self, index: int) -> bool:
        """Whether layer ``index``, a container of modules that are called one by one, has been entered already."""

    def call_inside(self, index: int, call: InnerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a further call inside such a container."""

    def call_part(self, call: PartCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a part outside the trunk that another stage owns."""

    def call_first_part(self, call: FirstCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of an owned part that runs before the layers."""


class AnswersLayers(Protocol):
    """Answers the calls of layers in the place of a cursor.

    Attributes:
        is_between: whether the step is after a backward, and has not called the layers again.
    """

    is_between: bool

    def note_read(self) -> None:
        """Take note that user code has gone over all parameters that this stage holds."""

    def call_layer(self, index: int, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of trunk layer ``index``."""


_BEFORE, _AFTER, _BEFORE_BACKWARD, _BACKWARD = GLOBAL_HOOKS


class HookedCall(Wrapper, Entry):
    """Around a module, outside of its hooks where user code has registered some; asks what to do with each call.

    Attributes:
        cursor: is asked.
        runs: computes the call that is being asked about: the module's forward, with hooks if it came past them.
    """

    slot = ForwardSlot.PIPELINE
    cursor: Follower
    runs: Callable[..., Any]
    _in_hooks = False

    def install(self) -> None:
        """Take the slot, and the place where torch runs a module's hooks."""
        super().install()
        self.open()

    def enter(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for calling the module: hooks and forward."""
        module = self.module
        if (
            module.forward is not self  # somebody has wrapped it since
            or module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or _BEFORE
            or _AFTER
            or _BEFORE_BACKWARD
            or _BACKWARD
        ):
            if not has_user_hooks(module):  # our own hooks want to meet each call of a step
                return self.run_hooked(*args, **kwargs)
            self.runs = self._run_hooked
        else:
            self.runs = self.forward
        return self.ask(args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_hooks:
            return self.forward(*args, **kwargs)
        self.runs = self.forward
        return self.ask(args, kwargs)

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass the call on to what follows the step."""
        raise NotImplementedError

    def _run_hooked(self, *args: Any, **kwargs: Any) -> Any:
        self._in_hooks = True
        try:
            return self.run_hooked(*args, **kwargs)
        finally:
            self._in_hooks = False


class LayerCall(HookedCall):
    """Around every trunk layer."""

    def __init__(self, cursor: Follower, index: int, name: str, module: nn.Module) -> None:
        super().__init__(module)
        self.cursor = cursor
        self.index = index
        self.sentinel = Sentinel(name, is_layer=True)
        self._main = _first_parameter(module.forward)

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`HookedCall`."""
        if self.cursor.recomputes and graph_task() == -1:
            check_checkpoint(self.index, self.sentinel.name)
        return self.cursor.call_layer(self.index, self, args, kwargs)

    def main_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """Indices, among the flattened arguments, of the tensors in the first argument (the hidden state)."""
        if args:
            main, offset = args[0], 0
        else:
            name = self._main if self._main in kwargs else next(iter(kwargs))
            main, offset = kwargs[name], 0
            for key, value in kwargs.items():
                if key == name:
                    break
                offset += len(pytree.tree_leaves(value))
        leaves = pytree.tree_leaves(main)
        found = tuple(offset + i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        if not found:
            raise RuntimeError(
                f"layer `{self.sentinel.name}` was called with a {type(main).__name__} as its first argument; a "
                "pipeline sends the first argument of a layer to the next stage, so it must be a tensor or a nest of "
                "tensors."
            )
        return found


class InnerCall(LayerCall):
    """Around the modules inside a layer that is a mere container: the first of them to be called enters the layer."""

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`HookedCall`."""
        if not in_backward() and self.cursor.is_inside(self.index):
            return self.cursor.call_inside(self.index, self, args, kwargs)
        return super().ask(args, kwargs)


class PartCall(HookedCall):
    """Around every hollow part outside the trunk.

    Attributes:
        index: its number among layers and parts, for what it leaves behind.
    """

    def __init__(self, cursor: Follower, index: int, module: nn.Module, sentinel: Sentinel) -> None:
        super().__init__(module)
        self.cursor = cursor
        self.index = index
        self.sentinel = sentinel

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`HookedCall`."""
        return self.cursor.call_part(self, args, kwargs)


class FirstCall(PartCall):
    """Around owned parts that run before the layers; again on stand-ins, where a stage has several pieces of these."""

    def enter(self, *args: Any, **kwargs: Any) -> Any:
        """See :class:`HookedCall`; at once where there is nothing to ask."""
        module = self.module
        own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        everywhere = _BEFORE or _AFTER or _BEFORE_BACKWARD or _BACKWARD
        if own or everywhere or module.forward is not self or not self.cursor.computes_parts:
            return super().enter(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :class:`HookedCall`."""
        return self.cursor.call_first_part(self, args, kwargs)


def has_user_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered on ``module``, or on all modules, that are not this package's own."""
    tables = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(users_hook(hook) is not None for table in (*tables, *GLOBAL_HOOKS) for hook in table.values())


def _first_parameter(forward: Callable[..., Any]) -> str:
    parameters = list(inspect.signature(forward).parameters)
    return parameters[0] if parameters else ""
