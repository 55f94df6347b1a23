"""Opens and closes the windows of layers along a training step.

::

    forward     F0 opens 0, closes 0 │ F1 opens 1, closes 1 │ ...
    backward    ... │ B1 opens 1 │ B0 opens 0             the two windows used last stay open
    between     all closed; whole while something asks for the weights, such as a checkpoint or an evaluation

In a backward a window is opened by the gradient of the layer's output, by autograd where it reads a weight that it has
saved, and by the layer's forward where that is computed anew. Code that uses a layer's weights without calling the
layer finds them whole: from then on to the end of the step the window is open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from lightning_megatron.data_parallel.buckets.buckets import GradientBuckets
from lightning_megatron.data_parallel.update.late_gather import UseWatch
from lightning_megatron.data_parallel.windows.window import Window
from lightning_megatron.layers.whole.base import WholeTensor
from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.parts.names import Parts
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack, Wrapper

_OPEN_IN_BACKWARD = 2  # one computes while hooks of the layer before it may still run


class StepWindows:
    """The windows of this rank's layers.

    Args:
        module: holds the layers; their forwards are wrapped until :meth:`close`.
        layers: name of a parameter -> name of its layer.
        buckets: with the weights of these parameters apart.
        stays_whole: whether code outside of layers may look at weights between steps.
        looks_before_backward: whether it may between a step's forward and its backward.

    Attributes:
        windows: in the order of the layers.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Mapping[str, str],
        buckets: GradientBuckets,
        *,
        stays_whole: bool = False,
        looks_before_backward: bool = False,
    ) -> None:
        self._stays_whole, self._looks_before_backward = stays_whole, looks_before_backward
        self._buckets = buckets
        names = list(dict.fromkeys(layers.values()))
        parts: dict[str, list[Any]] = {name: [] for name in names}
        for bucket in buckets.buckets:
            if bucket.weights is not None and bucket.weights.low is not None:
                parts[layers[bucket.names[0]]].append(bucket)
        self.windows = [Window(name, number, parts[name]) for number, name in enumerate(names)]
        self._of = {id(parameter): window for window in self.windows for parameter in window.parameters}
        self._recent: list[Window] = []
        self._active = False
        self._layers = [module.get_submodule(name) for name in names]
        for layer, window in zip(self._layers, self.windows, strict=True):
            LayerWindow(layer, window, self).install()

    @property
    def active(self) -> bool:
        """Whether a training step is under way, outside of which no window opens by itself."""
        return self._active

    def close(self) -> None:
        """Leave the layers' forwards as they were; the windows stay as they are."""
        self._active = False
        for layer in self._layers:
            ForwardStack.of(layer).remove(ForwardSlot.WEIGHTS)

    def show_all(self) -> None:
        """Make all weights whole, until the next training step; collective over the replicas."""
        self._active, self._recent = False, []
        for window in self.windows:
            window.open()

    def _hide_all(self) -> None:
        self._recent = []
        for window in self.windows:
            window.close()

    @property
    def place(self) -> str | None:
        """How far this rank has come, equal on replicas that made the same collectives; ``None`` if all is whole."""
        if all(window.is_open for window in self.windows):
            return None
        return f"{sum(window.opened for window in self.windows)} {[b.launched for b in self._buckets.buckets]}"

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a training step up to its backward, or, where it runs that itself, to its end."""
        self._hide_all()
        self._active = True
        with UseWatch(self.hold_used):
            yield
        if self._looks_before_backward:
            self.hold_all()

    def hold_all(self) -> None:
        """Make all weights whole, to the end of the step; collective over the replicas."""
        for window in self.windows if self._active else ():
            self._hold(window)

    def end_step(self) -> None:
        """Once the step's last backward has run: close all windows, or show all weights to code that may look."""
        if not self._active:
            return
        self._active = False
        if self._stays_whole:
            self.show_all()
        else:
            self._hide_all()

    def hold_used(self, parameter: Tensor) -> None:
        """Let a weight that is used outside of its layer be whole to the end of the step."""
        window = self._of.get(id(parameter))
        if window is not None and self._active and not window.is_open:
            self._hold(window)

    def _hold(self, window: Window) -> None:
        window.open()
        window.held = True

    def leave(self, window: Window) -> None:
        """The layer's forward is through; in a backward its backward follows."""
        if in_backward():
            self.need(window)
        elif not window.held:
            self._forget(window)
            window.close()

    def need(self, window: Window) -> None:
        """Open a window in a backward, and close the one that was needed longest ago."""
        if not self._active or window.held:
            return
        self._forget(window)
        window.open()
        self._recent.append(window)
        if len(self._recent) > _OPEN_IN_BACKWARD:
            oldest = self._recent.pop(0)
            if not oldest.held:
                oldest.close()

    def _forget(self, window: Window) -> None:
        self._recent = [other for other in self._recent if other is not window]


def spread_parameters(module: nn.Module, layers: Sequence[str], shared: Collection[str]) -> dict[str, str]:
    """Trained parameters of layers that nothing else holds: name -> name of the layer.

    Args:
        module: holds the layers.
        layers: their names.
        shared: names of parameters that other stages hold too.
    """
    parts, homes = Parts(layers), defaultdict(set)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        homes[id(parameter)].add(parts.of(name))
    found = {}
    for name, parameter in module.named_parameters():
        layer = parts.of(name)
        if parameter.requires_grad and layer is not None and len(homes[id(parameter)]) == 1 and name not in shared:
            found[name] = layer
    return found


class LayerWindow(Wrapper):
    """Opens the window of a layer around its forward, and sees to it that its backward finds it open.

    Args:
        module: the layer.
        window: with its weights.
        owner: closes the window.
    """

    slot = ForwardSlot.WEIGHTS

    def __init__(self, module: nn.Module, window: Window, owner: StepWindows) -> None:
        super().__init__(module)
        self._window: Window | None = window
        self._owner: StepWindows | None = owner

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the layer has weights of its own."""
        return {**self.__dict__, "_window": None, "_owner": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        window, owner = self._window, self._owner
        if window is None or owner is None or not owner.active:
            return self.forward(*args, **kwargs)
        window.open()
        try:
            with _saved(window, owner) if torch.is_grad_enabled() else nullcontext():
                output = self.forward(*args, **kwargs)
            self._follow(output, window, owner)
            return output
        finally:
            owner.leave(window)

    @staticmethod
    def _follow(output: Any, window: Window, owner: StepWindows) -> None:
        for leaf in pytree.tree_leaves(output):
            if not isinstance(leaf, Tensor):
                continue
            if isinstance(leaf, WholeTensor):  # gradients pass its part
                leaf = leaf.local()
            if window.has_memory_of(leaf):  # a weight is given out, to be used elsewhere
                window.held = True
            if leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(lambda _: owner.need(window))


class _Weight:
    """A weight, or a view of one, that autograd has saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _saved(window: Window, owner: StepWindows) -> saved_tensors_hooks:
    """Hooks by which autograd opens the window when it reads a weight; other tensors go to the hooks around these."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(tensor: Tensor) -> Any:
        if not isinstance(tensor, WholeTensor) and window.has_memory_of(tensor):  # parts are saved by themselves
            return _Weight(tensor)
        return (tensor, tensor._version) if around is None else around[0](tensor)

    def unpack(packed: Any) -> Any:
        if isinstance(packed, _Weight):
            owner.need(window)
            return packed.tensor
        return _unchanged(window.name, *packed) if around is None else around[1](packed)

    return saved_tensors_hooks(pack, unpack)


def _unchanged(layer: str, tensor: Tensor, version: int) -> Tensor:
    """A saved tensor, unless it was changed since: autograd leaves that to whoever keeps it."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)}, saved in `{layer}`, is at version {tensor._version}; expected version "
            f"{version} instead."
        )
    return tensor
