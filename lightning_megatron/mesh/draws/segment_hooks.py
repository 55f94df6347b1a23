"""Hooks that switch random streams from segment to segment of a step, on modules that are not cut and on parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_megatron.mesh.autograd import graph_task, in_backward
from lightning_megatron.mesh.draws.random_streams import SegmentStreams
from lightning_megatron.mesh.parts.packages import comes_from


class SegmentHooks:
    """Enters the segment streams of a trunk that is not cut, so that one process draws the same numbers as a pipeline.

    Args:
        layers: the trunk's layers.
        streams: the streams.
        parts: modules outside the trunk that hold parameters.
    """

    def __init__(self, layers: Sequence[nn.Module], streams: SegmentStreams, parts: Sequence[nn.Module] = ()) -> None:
        self._streams = streams
        self._layers = len(layers)
        self._micro_batch: int | None = None
        self._latest, self._calls = 0, dict[int, int]()
        self._parts = PartHooks(parts, streams, lambda: None if self._calls else self._micro_batch)
        self._handles = [
            layer.register_forward_pre_hook(functools.partial(self._enter, 1 + index))
            for index, layer in enumerate(layers)
        ]
        self._handles.append(layers[-1].register_forward_hook(functools.partial(self._enter, 1 + self._layers)))
        for index, layer in enumerate(layers[:-1]):
            self._handles.append(layer.register_forward_hook(functools.partial(self._leave, index)))

    def begin(self, micro_batch: int) -> None:
        """Enter the segment before the trunk of a micro-batch."""
        self._micro_batch = self._latest = micro_batch
        self._calls = {}
        self._streams.enter_micro_batch(micro_batch)

    def resume(self) -> None:
        """Enable the hooks for the backward of the micro-batch that was begun last."""
        self._micro_batch = self._latest

    def end(self) -> None:
        """Disable the hooks until the next :meth:`begin`."""
        self._micro_batch = None

    def remove(self) -> None:
        """Remove the hooks."""
        self._parts.remove()
        for handle in self._handles:
            handle.remove()

    def _leave(self, layer: int, *_: Any) -> None:
        if self._micro_batch is not None and graph_task() == -1:
            self._streams.leave(layer, self._calls[1 + layer] - 1)

    def _enter(self, segment: int, *_: Any) -> None:
        if self._micro_batch is None:
            return
        call = self._calls.get(segment, 0)
        if graph_task() != -1:  # the user's activation checkpointing recomputes, and must draw the same numbers
            self._streams.enter(self._micro_batch, segment, max(0, call - 1))
            return
        self._calls[segment] = call + 1
        self._streams.enter(self._micro_batch, segment, call)


class PartHooks:
    """Makes each part that runs before the layers draw from a stream of its own.

    A stage without the part does not run it, and so draws nothing for it. The numbers that the step itself draws after
    the part (a diffusion model's time steps, noise) must still be equal on all stages.

    Args:
        parts: modules outside the trunk; those that cannot draw random numbers get no hooks.
        streams: the streams.
        before_trunk: returns the current micro-batch, or ``None`` if no step runs or its layers have begun.
    """

    def __init__(
        self, parts: Sequence[nn.Module], streams: SegmentStreams, before_trunk: Callable[[], int | None]
    ) -> None:
        self._streams = streams
        self._before_trunk = before_trunk
        self._saved: dict[int, Any] = {}
        self._calls: dict[int, tuple[tuple[int, int], int]] = {}
        self._handles = []
        for index, part in enumerate(parts):
            if _may_draw(part):
                self._handles.append(part.register_forward_pre_hook(functools.partial(self._enter, index)))
                self._handles.append(part.register_forward_hook(functools.partial(self._leave, index)))

    def use_streams(self, streams: SegmentStreams) -> None:
        """Draw from other streams from now on."""
        self._streams = streams

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, index: int, *_: Any) -> None:
        micro_batch = self._before_trunk()
        self._saved.pop(index, None)
        if micro_batch is None or in_backward():
            return
        self._saved[index] = self._streams.position()
        now = (self._streams.step_state, micro_batch)
        last, call = self._calls.get(index, (None, 0))
        call = call + 1 if last == now else 0
        self._calls[index] = (now, call)
        self._streams.enter(micro_batch, -1 - index, call)

    def _leave(self, index: int, *_: Any) -> None:
        if index in self._saved:
            self._streams.go_to(self._saved.pop(index))


def _may_draw(module: nn.Module) -> bool:
    """Whether ``module`` may draw random numbers: it contains a dropout, or a module that is not torch's."""
    children = list(module.modules())
    foreign = any(not comes_from(type(child), "torch.nn.modules") for child in children)
    return foreign or any(isinstance(child, _DropoutNd) and child.p > 0 for child in children)
