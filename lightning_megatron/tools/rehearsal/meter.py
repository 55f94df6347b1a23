"""Measures the memory of tensors: the activations that a step keeps for its backward, and the peak.

The meter records the storage of every tensor that an operation returns, until torch frees it. It measures rehearsals,
whose storages have a size but no memory, as well as real runs on the CPU, so that tests can compare the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_megatron.mesh.autograd import in_backward


class MemoryMeter:
    """Counts the bytes of live storages.

    Attributes:
        alive: bytes of the storages that are alive now.
        peak: largest number of bytes alive at once since :meth:`start`.
        kept: activations: largest number of bytes alive when a backward began, minus those alive at :meth:`start`.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int, int]] = {}
        self._base = self._births = self._started = self._kept_at = 0
        self._in_backward = False
        self.alive = self.peak = self.kept = 0

    def start(self) -> None:
        """Begin to measure a step; storages alive now do not count as activations."""
        self._base = self.peak = self.alive
        self._started = self._kept_at = self._births
        self.kept = 0

    def within(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of those ``tensors`` that ``kept`` counts: made in this step, and alive when ``kept`` was measured."""
        born = {id(s): self._known.get(id(s), (None, 0, 0)) for s in (t.untyped_storage() for t in tensors)}
        return sum(size for _, size, at in born.values() if self._started < at <= self._kept_at)

    def seen(self, tensor: Tensor) -> None:
        """Record a tensor that an operation returned."""
        backward = in_backward()
        if backward and not self._in_backward and self.alive - self._base > self.kept:
            self.kept, self._kept_at = self.alive - self._base, self._births
        self._in_backward = backward
        storage = tensor.untyped_storage()
        if id(storage) in self._known:
            return
        size = storage.nbytes()
        self._births += 1
        self._known[id(storage)] = weakref.ref(storage, partial(self._freed, id(storage))), size, self._births
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _freed(self, key: int, _: Any) -> None:
        self.alive -= self._known.pop(key)[1]


class Metered(TorchDispatchMode):
    """Dispatch mode that passes every tensor of a real run to a meter.

    Attributes:
        meter: the meter.
    """

    def __init__(self, meter: MemoryMeter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            # A wrapper such as DTensor: the operations on the tensors inside of it are dispatched here again.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self.meter.seen(leaf)
        return result


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each counted once."""
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
