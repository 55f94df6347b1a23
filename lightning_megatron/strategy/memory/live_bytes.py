"""Counts the bytes of one step by kind, operation by operation: every memory from the operation that makes it to the
moment when the last tensor on it goes.

What a memory was for is only known afterwards. One that a forward made and that outlived it was an activation; one that
gradients or the optimizer's state lie in is told by the run::

    operation   embed  layer   loss │ loss'     layer'   embed' │ update
    memory      ├── activation ─────┼──┤
                       ├ buffer ┤   │           ├── gradient ──┼──────
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.strategy.memory.ledger import BYTE_KINDS, KINDS, Bytes, storage_of

_FILLING = ("detach", "copy_", "_foreach_copy_", "empty")
"""Operations around which gradients find the memory that they stay in."""


@dataclass(eq=False)
class _Memory:
    """One memory.

    Attributes:
        size: bytes now.
        kind: if it is known.
        forward: whether a forward made it, whose gradients are wanted.
        outlived: whether it was there when a backward began to run after that.
        storage: the memory, without keeping it.
    """

    size: int
    kind: str | None
    forward: bool
    storage: Any
    outlived: bool = False

    @property
    def final_kind(self) -> str:
        """Its kind, once known."""
        return self.kind or ("activations" if self.forward and self.outlived else "buffers")


@dataclass
class StepBytes:
    """Bytes of one step of a rank, over its time.

    Attributes:
        seconds: since the step began, point by point.
        kinds: by kind, bytes at each of these points.
        host: bytes in host memory, where an optimizer lies there.
        allocated: the most that the device's allocator gave out; 0 where it does not tell.
    """

    seconds: list[float] = field(default_factory=list)
    kinds: dict[str, list[int]] = field(default_factory=dict)
    host: int = 0
    allocated: int = 0

    @property
    def totals(self) -> list[int]:
        """Bytes of all kinds, point by point."""
        return [sum(values) for values in zip(*self.kinds.values(), strict=True)]

    @property
    def peak(self) -> Bytes:
        """Bytes by kind at the fullest moment."""
        if not self.seconds:
            return Bytes(host=self.host)
        totals = self.totals
        at = totals.index(max(totals))
        return Bytes(**{kind: values[at] for kind, values in self.kinds.items()}, host=self.host)

    def thinned(self, points: int) -> StepBytes:
        """The same in at most ``points`` points: of neighbours, the fullest."""
        width = -(-len(self.seconds) // points) or 1
        totals = self.totals
        runs = [range(start, min(start + width, len(totals))) for start in range(0, len(totals), width)]
        kept = [max(run, key=lambda index: totals[index]) for run in runs]
        kinds = {kind: [values[index] for index in kept] for kind, values in self.kinds.items()}
        return StepBytes([self.seconds[index] for index in kept], kinds, self.host, self.allocated)


class LiveBytes(TorchDispatchMode):
    """Context around a step.

    Args:
        device: whose memory is counted.
        lasting: tensors that are there from step to step, each with its kind; asked for at both ends of the step.
        gradients: those that are there now; asked for where gradients arrive.
    """

    def __init__(
        self,
        device: torch.device,
        lasting: Callable[[], Iterable[tuple[Tensor, str]]],
        gradients: Callable[[], Iterable[Tensor]],
    ) -> None:
        super().__init__()
        self._device, self._lasting, self._gradients = device, lasting, gradients
        self._memories: dict[int, _Memory] = {}
        self._resizable: list[_Memory] = []
        self._waiting: list[_Memory] = []
        self._events: list[tuple[int, _Memory, int]] = []
        self._times: list[float] = []
        self._filled = False
        self._began = 0.0

    def begin(self, batch: Any) -> None:
        """Start to count; ``batch`` is the step's batch."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._began = time.perf_counter()
        self._times.append(0.0)
        self._name_lasting()
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                self._see(leaf, "buffers")
        self.__enter__()

    def end(self) -> StepBytes:
        """Stop counting."""
        self.__exit__(None, None, None)
        self._point()
        self._name_lasting()
        found = self._sum_up()
        self._memories, self._events = {}, []
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at what is there then."""
        result = func(*args, **(kwargs or {}))
        self._point()
        backward = in_backward()
        if backward and self._waiting:
            for memory in self._waiting:
                memory.outlived = memory.size > 0
            self._waiting = []
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, None, forward=not backward and torch.is_grad_enabled())
        if self._filled:
            self._name_gradients()
        name = func.__name__.partition(".")[0]
        self._filled = name in _FILLING or func.namespace == "c10d"
        return result

    def _point(self) -> None:
        self._times.append(time.perf_counter() - self._began)
        for memory in self._resizable:
            storage = memory.storage()
            size = 0 if storage is None else storage.nbytes()
            if size != memory.size:
                self._change(memory, size)

    def _change(self, memory: _Memory, size: int, *, later: bool = False) -> None:
        """Note a size at the latest point, or the next one: what goes after an operation was there in it."""
        self._events.append((len(self._times) - 1 + later, memory, size - memory.size))
        memory.size = size

    def _see(self, tensor: Tensor, kind: str | None, *, forward: bool = False) -> _Memory | None:
        """Note the memory of a tensor, unless it is known; and what it is for, if that is."""
        storage = storage_of(tensor, self._device)
        if storage is None:
            return None
        key = storage._cdata
        memory = self._memories.get(key)
        if memory is None:
            memory = _Memory(0, kind, forward, weakref.ref(storage, lambda _: self._gone(key)))
            self._memories[key] = memory
            self._change(memory, storage.nbytes())
            if forward:
                self._waiting.append(memory)
        elif kind is not None:
            memory.kind = memory.kind or kind
        return memory

    def _gone(self, key: int) -> None:
        memory = self._memories.pop(key, None)
        if memory is None:
            return
        self._change(memory, 0, later=True)
        if memory in self._resizable:
            self._resizable.remove(memory)

    def _name_lasting(self) -> None:
        for tensor, kind in self._lasting():
            memory = self._see(tensor, kind)
            if memory is not None and kind == "weights" and memory not in self._resizable:
                self._resizable.append(memory)
        self._name_gradients()

    def _name_gradients(self) -> None:
        with torch._C.DisableTorchFunction():  # else those who watch what a step reads would see one here
            for gradient in self._gradients():
                self._see(gradient, "gradients")

    def _sum_up(self) -> StepBytes:
        now = dict.fromkeys(BYTE_KINDS, 0)
        kinds: dict[str, list[int]] = {kind: [] for kind in KINDS}
        most, events = 0, iter([*sorted(self._events, key=lambda event: event[0]), None])
        event = next(events)
        for point in range(len(self._times)):
            while event is not None and event[0] <= point:
                now[event[1].final_kind] += event[2]
                event = next(events)
            most = max(most, now["host"])
            for kind, values in kinds.items():
                values.append(now[kind])
        allocated = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        return StepBytes(self._times, kinds, most, allocated)
