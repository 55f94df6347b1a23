"""Opens windows where their weights are used for the first time: by a call of a module, or by any other torch function.

The three kinds of windows share this: weights that are spread over replicas, that are streamed from files, and that
still arrive from the replicas that have updated them. What opens a window, and when it closes, its owner decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_megatron.data_parallel.windows.reported_uses import ReportedUses
from lightning_megatron.data_parallel.windows.saved_weights import saved_weights
from lightning_megatron.data_parallel.windows.window import Window, WindowOwner
from lightning_megatron.layers.whole.base import WholeTensor
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack, Wrapper


class Openers:
    """The modules of one owner that open windows.

    Args:
        module: holds the modules; their forwards are wrapped until :meth:`remove`.
        owner: of the windows.
    """

    def __init__(self, module: nn.Module, owner: WindowOwner) -> None:
        self._module, self._owner = module, owner
        self._of: dict[int, Window] = {}
        self._layers: dict[str, LayerWindow] = {}

    def add(self, window: Window, modules: Iterable[str]) -> None:
        """Let modules open one more window.

        Args:
            window: with weights that they hold.
            modules: their names.
        """
        self._of.update((id(parameter), window) for parameter in window.parameters)
        for name in modules:
            if name not in self._layers:
                self._layers[name] = LayerWindow(self._module.get_submodule(name), self._owner)
                self._layers[name].install()
            self._layers[name].windows.append(window)

    @property
    def most(self) -> int:
        """The most windows that one module opens."""
        return max((len(layer.windows) for layer in self._layers.values()), default=1)

    def window_of(self, parameter: Tensor) -> Window | None:
        """The window that a parameter lies in."""
        return self._of.get(id(parameter))

    def watched(self) -> AbstractContextManager[Any]:
        """Around code that may use weights without a call of their module: they are whole from there on, to be held."""
        return ReportedUses(self._of, self.used)

    def used(self, parameter: Tensor) -> None:
        """Open the window of a weight that is used, which is to be held."""
        window = self._of.get(id(parameter))
        if window is not None and self._owner.active and not window.is_open:
            self._owner.open(window)
            window.held = True

    def remove(self) -> None:
        """Leave the modules' forwards as they were before; the windows stay as they are."""
        for layer in self._layers.values():
            ForwardStack.of(layer.module).remove(ForwardSlot.WEIGHTS)
        self._layers = {}


class LayerWindow(Wrapper):
    """Opens the windows of a layer around its forward, and makes sure that its backward finds them open.

    Args:
        module: the layer.
        owner: of the windows, which may close them.

    Attributes:
        windows: with its weights.
    """

    slot = ForwardSlot.WEIGHTS

    def __init__(self, module: nn.Module, owner: WindowOwner) -> None:
        super().__init__(module)
        self.windows: list[Window] = []
        self._owner: WindowOwner | None = owner

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the layer has weights of its own."""
        return {**self.__dict__, "windows": [], "_owner": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        windows, owner = self.windows, self._owner
        if owner is None or not owner.active:
            return self.forward(*args, **kwargs)
        for window in windows:
            owner.open(window)
        if not owner.closes:
            return self.forward(*args, **kwargs)
        owner.gather_ahead()
        try:
            with saved_weights(windows, owner) if torch.is_grad_enabled() else nullcontext():
                output = self.forward(*args, **kwargs)
            self._follow(output, owner)
            return output
        finally:
            for window in windows:
                owner.leave(window)

    def _follow(self, output: Any, owner: WindowOwner) -> None:
        for leaf in pytree.tree_leaves(output):
            if not isinstance(leaf, Tensor):
                continue
            if isinstance(leaf, WholeTensor):  # gradients pass its part
                leaf = leaf.local()
            for window in self.windows:
                if window.has_memory_of(leaf):  # a weight is given out, to be used elsewhere
                    window.held = True
                if leaf.requires_grad and leaf.grad_fn is not None:
                    leaf.register_hook(lambda _, window=window: owner.need(window))
