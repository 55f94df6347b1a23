"""Weights of a layer that autograd saves; a backward finds their numbers once the layer's window is open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_megatron.data_parallel.windows.window import Window, WindowOwner
from lightning_megatron.layers.whole.base import WholeTensor
from lightning_megatron.mesh.autograd import HandsOn, saved_values


class _Weight:
    """A weight, or a view of one, that autograd has saved."""

    def __init__(self, tensor: Tensor, window: Window) -> None:
        self.again, self.window = window.found_again(tensor), window


class _Saved(HandsOn):
    """Hooks by which autograd opens a window when it reads a weight; other tensors go to the hooks around these.

    Made while the windows are open: they run once per saved tensor, so where the weights lie is looked up once.
    """

    def __init__(self, windows: Sequence[Window], owner: WindowOwner) -> None:
        self._windows, self._owner = windows, owner
        self._of = {place: window for window in windows for place in window.places() if place}
        self.around = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(self, tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunction():  # else those who watch uses would see some here
            if not isinstance(tensor, WholeTensor) and tensor.layout is torch.strided:  # whose parts are saved apart
                window = self._of.get(tensor.untyped_storage().data_ptr())
                if window is not None:
                    return _Weight(tensor, window)
            if self.around is None:
                return saved_values(tensor), tensor._version
        return self.around[0](tensor)

    def unpack(self, packed: Any) -> Any:
        if isinstance(packed, _Weight):
            self._owner.need(packed.window)
            return packed.again()
        return _unchanged(self._windows[0].name, *packed) if self.around is None else self.around[1](packed)


def saved_weights(windows: Sequence[Window], owner: WindowOwner) -> saved_tensors_hooks:
    """Around a layer's forward, while its windows are open: what autograd saves of weights, it finds again there.

    Args:
        windows: of the layer.
        owner: opens them in the backward.
    """
    hooks = _Saved(windows, owner)
    return saved_tensors_hooks(hooks.pack, hooks.unpack)


def _unchanged(layer: str, tensor: Tensor, version: int) -> Tensor:
    """A saved tensor, unless it was changed since: autograd leaves that to whoever keeps it."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)}, saved in `{layer}`, is at version {tensor._version}; expected version "
            f"{version} instead."
        )
    return tensor
