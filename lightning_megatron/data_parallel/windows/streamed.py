"""Weights that are read when their layer runs and freed after it, for models larger than memory (ZeRO-Inference).

The windows are those of weights that are spread over replicas, but what opens one is a read from a file or from host
memory instead of a gather. While a layer computes, a thread reads the next one::

    runs        0        1        2        3            (and again from 0 for the next token)
    reads    0  1 ────── 2 ────── 3 ────── 0 ──────
    memory   0  0 1      1 2      2 3      3 0

Which window is next, the call before has shown; until then it is the next one in the order of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.data_parallel.windows.openers import Openers
from lightning_megatron.data_parallel.windows.window import Window
from lightning_megatron.mesh.autograd import in_backward

Read = Callable[[Sequence[str]], dict[str, Tensor]]
"""Gives tensors by name, on the device that computes; called by a thread."""


class StreamedWindow(Window):
    """The weights of one layer, which are read when it opens.

    Args:
        name: of the layer.
        number: its place in the order of the module.
        weights: by name.
        owner: reads.

    Attributes:
        names: of the weights.
        size: bytes of them.
    """

    def __init__(self, name: str, number: int, weights: Mapping[str, nn.Parameter], owner: StreamedWindows) -> None:
        super().__init__(name, number, ())
        self._weights, self._owner = dict(weights), owner
        self.names = list(weights)
        self.size = sum(parameter.numel() * parameter.element_size() for parameter in weights.values())
        self.is_open = False

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters in it."""
        return iter(self._weights.values())

    @property
    def live_bytes(self) -> int:
        """The same, or 0 while the window is closed."""
        return self.size if self.is_open else 0

    def open(self) -> None:
        """Let the parameters have their values, unless they have."""
        if self.is_open:
            return
        self.opened += 1
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for name, value in self._owner.take(self).items():
                self._weights[name].data = value
        self.is_open = True

    def close(self) -> None:
        """Free them; what code has written into them is lost."""
        if not self.is_open:
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for parameter in self.parameters:
                hide(parameter)
        self.is_open, self.held = False, False
        self._owner.gave_back(self)

    def places(self) -> list[int]:
        """Addresses of the weights' memory."""
        with torch._C.DisableTorchFunction():
            return [parameter.untyped_storage().data_ptr() for parameter in self.parameters]

    def found_again(self, tensor: Tensor) -> Callable[[], Tensor]:
        """A function that returns one of the weights, or a view of one, once the window is open again."""
        with torch._C.DisableTorchFunction():
            parameter, form = self._behind(tensor), (tensor.shape, tensor.stride(), tensor.storage_offset())
        return partial(_view_of, parameter, *form) if parameter is not None else super().found_again(tensor)

    def _behind(self, tensor: Tensor) -> nn.Parameter | None:
        """The weight whose memory a tensor has."""
        place = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
        alike = (one for one in self.parameters if place and one.untyped_storage().data_ptr() == place)
        return next(alike, None)


class StreamedWindows:
    """The windows of the modules of this rank whose weights are streamed.

    Args:
        module: holds them; their forwards are wrapped from here on.
        weights: by name of a window, its parameters by name; they are hidden.
        openers: by name of a window, the names of the modules that open it.
        ahead: how many windows are read ahead.
        device: where the layers compute.

    Attributes:
        windows: in the order of the module.
        live_bytes: of weights that are open, or were read ahead.
        peak_bytes: the most of them at a time.
        read_bytes: that were read so far.
        read: where values come from; set before the first call.
    """

    active = closes = True
    read: Read

    def __init__(
        self,
        module: nn.Module,
        weights: Mapping[str, Mapping[str, nn.Parameter]],
        openers: Mapping[str, Sequence[str]],
        ahead: int,
        device: torch.device,
    ) -> None:
        self.windows = [StreamedWindow(name, at, weights[name], self) for at, name in enumerate(weights)]
        self._ahead, self._device = ahead, device
        self._next = {one.number: other for one, other in zip(self.windows, _rotated(self.windows), strict=True)}
        self._latest: StreamedWindow | None = None
        self._in_backward: Window | None = None
        self._reading: dict[int, Future[dict[str, Tensor]]] = {}
        self._thread = ThreadPoolExecutor(1, "weights")
        self.live_bytes = self.peak_bytes = self.read_bytes = 0
        self._openers = Openers(module, self)
        for window in self.windows:
            self._openers.add(window, openers[window.name])

    @property
    def largest(self) -> int:
        """Bytes of the largest window."""
        return max((window.size for window in self.windows), default=0)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around code that may use weights without a call of their layer: those are whole to its end."""
        try:
            with self._openers.watched():
                yield
        finally:
            for window in self.windows:
                window.close()

    def open(self, window: Window) -> None:
        """Let the weights be there; those that follow are read ahead."""
        window.open()

    def gather_ahead(self) -> None:
        """Do nothing: what follows is under way."""

    def leave(self, window: Window) -> None:
        """The layer's forward is through; one that is computed anew in a backward has that before it."""
        if in_backward():
            self.need(window)
        elif not window.held:
            window.close()

    def need(self, window: Window) -> None:
        """Open a window in a backward, and close the one before it."""
        if self._in_backward is not None and self._in_backward is not window and not self._in_backward.held:
            self._in_backward.close()
        window.open()
        self._in_backward = window

    def take(self, window: StreamedWindow) -> dict[str, Tensor]:
        """The values of a window, read now or ahead; then begin to read those that follow it."""
        if self._latest is not None:
            self._next[self._latest.number] = window
        self._latest = window
        wanted = self._following(window)
        for number in set(self._reading) - {other.number for other in wanted} - {window.number}:
            self._drop(number)  # before another one takes memory
        under_way = self._reading.pop(window.number, None)
        if under_way is None:
            self._count(window.size)
            values = self.read(window.names)
        else:
            values = under_way.result()
        for other in wanted:
            if other.number not in self._reading:
                self._count(other.size)
                self._reading[other.number] = self._thread.submit(self._read_ahead, other.names)
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            for value in values.values():
                value.record_stream(stream)
        return values

    def gave_back(self, window: StreamedWindow) -> None:
        """Count what a window has freed."""
        self.live_bytes -= window.size

    def rest(self) -> None:
        """Free the weights that were read ahead, between two uses of the model."""
        for number in list(self._reading):
            self._drop(number)

    def remove(self) -> None:
        """Leave the layers' forwards as they were before; their weights stay hidden."""
        self.rest()
        self._thread.shutdown()
        self._openers.remove()

    def _following(self, window: StreamedWindow) -> list[StreamedWindow]:
        """The closed windows that are needed next."""
        found: list[StreamedWindow] = []
        for _ in range(self._ahead):
            window = self._next[window.number]
            if not window.is_open and window not in found and window is not self._latest:
                found.append(window)
        return found

    def _read_ahead(self, names: Sequence[str]) -> dict[str, Tensor]:
        if self._device.type != "cuda":
            return self.read(names)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            values = self.read(names)
        stream.synchronize()
        return values

    def _drop(self, number: int) -> None:
        under_way = self._reading.pop(number)
        if not under_way.cancel():
            wait([under_way])
        self.gave_back(self.windows[number])

    def _count(self, size: int) -> None:
        self.live_bytes += size
        self.read_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _view_of(parameter: nn.Parameter, *form: Any) -> Tensor:
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return torch.as_strided(parameter.data, *form)


def hide(parameter: nn.Parameter) -> None:
    """Let a parameter read as NaN, of its shape, and take no memory."""
    parameter.data = nowhere(parameter, parameter.device)


def nowhere(parameter: Tensor, device: torch.device) -> Tensor:
    """A tensor of the shape of ``parameter`` that reads as NaN and takes no memory."""
    with torch.inference_mode(False):
        return torch.full((), float("nan"), dtype=parameter.dtype, device=device).expand(parameter.shape)


def _rotated(windows: list[StreamedWindow]) -> list[StreamedWindow]:
    return [*windows[1:], *windows[:1]]
