"""Wrappers around the forwards of a cut module's layers and parts.

A call decides nothing: it passes itself on to whatever follows the step, a :class:`Follower`, which computes it, skips
it or ends the step there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.pipeline.elsewhere.standin import Sentinel
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, Wrapper


class Follower(Protocol):
    """Follows the user's step call by call and answers each of them: the stage's cursor."""

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


class LayerCall(Wrapper):
    """Around the ``forward`` of every trunk layer; asks the cursor what to do with each call."""

    slot = ForwardSlot.PIPELINE

    def __init__(self, cursor: Follower, index: int, name: str, module: nn.Module) -> None:
        super().__init__(module)
        self.cursor = cursor
        self.index = index
        self.sentinel = Sentinel(name, is_layer=True)
        self._main = _first_parameter(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not in_backward() and self.cursor.is_inside(self.index):
            return self.cursor.call_inside(self.index, self, args, kwargs)
        return super().__call__(*args, **kwargs)


class PartCall(Wrapper):
    """Around the ``forward`` of every hollow part outside the trunk."""

    slot = ForwardSlot.PIPELINE

    def __init__(self, cursor: Follower, module: nn.Module, sentinel: Sentinel) -> None:
        super().__init__(module)
        self.cursor = cursor
        self.sentinel = sentinel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cursor.call_part(self, args, kwargs)


class FirstCall(PartCall):
    """Around owned parts that run before the layers, where a stage has several pieces of the layers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cursor.call_first_part(self, args, kwargs)


def _first_parameter(forward: Callable[..., Any]) -> str:
    parameters = list(inspect.signature(forward).parameters)
    return parameters[0] if parameters else ""
