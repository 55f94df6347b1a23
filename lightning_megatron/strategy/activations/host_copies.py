"""Saved tensors in host memory: copied there when they are saved, and back before the backward asks for them.

One call of a layer makes a :class:`KeptCall`. What autograd saves in it is copied to the host, by the tensor's whole
memory, so that views share one copy and come back with the strides they had; the device's memory is free as soon as
nothing else holds it. When the backward first asks for one of a call, all of its copies start on their way back, and
those of the call before it in the forward, which the backward needs next::

    backward of      layer 2         layer 1         layer 0
    on the way back  layers 2, 1     layer 0
    on the device    2 (1)           1 (0)           0

so that the device holds two layers' at a time. On a device with memory of its own the copies run on streams of their
own, from and to pinned memory. On a CPU they are copies like any other, which are counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_megatron.mesh.messages.host_link import Copy, HostLink
from lightning_megatron.pipeline.elsewhere.abstract import is_ordinary


class CopyNotes(Protocol):
    """Source of remarks about the copies."""

    def report(self) -> str:
        """In words."""


class Traffic:
    """Copies between device and host memory, counted; of all layers of a module.

    Args:
        link: what copies.
        budget: how many tokens are kept, where that was left open.

    Attributes:
        link: what copies.
        budget: how many tokens are kept, and why.
        kept: bytes that the latest call of each layer keeps on the host, by layer, then by kind: ``"input"``,
            ``"attention"`` (outputs, and what else attention saves of its own), ``"other"``.
        replayed: tokens that the latest call of each layer has computed again, and of how many.
        sent: bytes copied to the host so far.
        returned: bytes copied back so far.
        held: bytes in host memory now.
        most: the most there have been.
        out: bytes that have come back and are still on the device.
        most_out: the most there have been.
    """

    def __init__(self, link: HostLink, budget: CopyNotes | None = None) -> None:
        self.link, self.budget = link, budget
        self.kept: dict[str, Counter[str]] = {}
        self.replayed: dict[str, tuple[int, int]] = {}
        self.sent = self.returned = self.held = self.most = self.out = self.most_out = 0
        self.latest: weakref.ref[KeptCall] | None = None

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        return Traffic, (HostLink(),)

    def report(self) -> str:
        """Bytes on the host, layer by layer; of this rank's latest calls."""
        lines = [] if self.budget is None else [self.budget.report()]
        for name, kinds in self.kept.items():
            told = ", ".join(f"{kind} {count:,}" for kind, count in kinds.items())
            again, tokens = self.replayed.get(name, (0, 0))
            rest = f"; {again} of {tokens} tokens computed again" if again else ""
            lines.append(f"`{name}` keeps {sum(kinds.values()):,} bytes in host memory: {told}{rest}")
        lines.append(f"at most {self.most:,} bytes in host memory at a time, {self.most_out:,} of them back again")
        return "\n".join(lines)


class HostCopy:
    """One tensor's memory on the host. ``uses``: how often the backward is yet to ask for it.

    Args:
        source: flat or not; copied as it lies.
        traffic: counts it.
        device: where it comes back to.
    """

    def __init__(self, source: Tensor, traffic: Traffic) -> None:
        self._traffic, self._device, self.uses = traffic, source.device, 0
        self._host = traffic.link.room(source)
        self.bytes = self._host.nbytes
        self._leaving = traffic.link.start(self._host, source)
        self._back: tuple[Tensor, Copy] | None = None
        traffic.sent += self.bytes
        traffic.held += self.bytes
        traffic.most = max(traffic.most, traffic.held)

    def start(self) -> tuple[Tensor, Copy]:
        """Start the copy back to the device; returns its target."""
        if self._back is not None:
            return self._back
        self._leaving.wait()
        target, traffic = torch.empty_like(self._host, device=self._device, pin_memory=False), self._traffic
        self._back = target, traffic.link.start(target, self._host)
        traffic.returned += self.bytes
        traffic.out += self.bytes
        traffic.most_out = max(traffic.most_out, traffic.out)
        return self._back

    def get(self) -> Tensor:
        """The copy on the device again, once it is there; it is dropped when it has been asked for often enough."""
        target, copy = self._back or self.start()
        copy.wait()
        self.uses -= 1
        if self.uses <= 0:
            self.drop()
        return target

    def drop(self) -> None:
        """Let the copy on the device go."""
        if self._back is not None:
            self._back = None
            self._traffic.out -= self.bytes

    def __del__(self) -> None:
        self.drop()
        self._traffic.held -= self.bytes


Form = tuple[torch.dtype, torch.Size, tuple[int, ...], Any, bool, bool]
"""Dtype, size, strides and offset; whether numbers are to be read as conjugates, and with the other sign."""


@dataclass
class View:
    """A saved tensor: how it lies in the memory of a copy."""

    copy: HostCopy
    form: Form | None

    def get(self) -> Tensor:
        """The tensor, on the device."""
        memory = self.copy.get()
        if self.form is None:
            return memory
        dtype, size, stride, offset, *read_as = self.form
        memory = memory if memory.dtype == dtype else memory.view(dtype)
        return _flipped(memory.as_strided(size, stride, offset), *read_as)


@dataclass
class KeptCall:
    """The tensors that one call of a layer keeps.

    Attributes:
        name: of the layer.
        traffic: counts.
        here: memories that stay where they are: of parameters, buffers and what the layer was given beside its input.
    """

    name: str
    traffic: Traffic
    here: set[int]
    before: weakref.ref[KeptCall] | None = None
    _copies: list[HostCopy] = field(default_factory=list)
    _kinds: dict[int, str] = field(default_factory=dict)
    _seen: dict[Any, View] = field(default_factory=dict)
    _addresses: dict[int, Any] = field(default_factory=dict)
    _started: bool = False

    def __post_init__(self) -> None:
        self.before, self.traffic.latest = self.traffic.latest, weakref.ref(self)
        self.traffic.kept[self.name] = Counter()

    def stays(self, tensor: Any) -> bool:
        """Whether a saved tensor is left where it is."""
        if not is_ordinary(tensor) or tensor.layout != torch.strided or not tensor.numel():
            return True
        return memory_of(tensor) in self.here

    def whole(self, tensor: Tensor, kind: str) -> View:
        """A saved tensor, to be kept whole; views of one memory share its copy."""
        storage = tensor.untyped_storage()
        elements, rest = divmod(storage.nbytes(), tensor.element_size())
        alone = storage.nbytes() > 2 * tensor.nbytes or rest > 0
        key = (memory_of(tensor), tensor._version, *(form_of(tensor) if alone else ()))
        if key not in self._seen:
            memory = tensor.detach()
            memory = memory.clone() if alone else _as_it_lies(memory).as_strided((elements,), (1,), 0)
            self._seen[key] = View(self.copied(memory, kind), None)
            self.remember(tensor)
        view = self._seen[key]
        return view if alone else View(view.copy, form_of(tensor))

    def copied(self, source: Tensor, kind: str) -> HostCopy:
        """A copy on the host, counted as one of a ``kind``."""
        copy = HostCopy(source, self.traffic)
        self.kinds[kind] += copy.bytes
        self._copies.append(copy)
        self._kinds[id(copy)] = kind
        return copy

    @property
    def kinds(self) -> Counter[str]:
        """Bytes that it keeps, by kind."""
        return self.traffic.kept[self.name]

    def forget_unused(self) -> None:
        """Free the copies that the backward is not going to ask for."""
        for copy in self._copies:
            if copy.uses <= 0:
                self.kinds[self._kinds.pop(id(copy))] -= copy.bytes
        self._copies = [copy for copy in self._copies if copy.uses > 0]
        self._seen = {key: view for key, view in self._seen.items() if view.copy.uses > 0}

    def remember(self, tensor: Tensor) -> None:
        """Keep another memory from this tensor's address, while this call is there."""
        self._addresses[memory_of(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def fetch(self) -> None:
        """Start all copies back, and those of the call before."""
        if self._started:
            return
        self.begin()
        before = None if self.before is None else self.before()
        if before is not None:
            before.begin()

    def let_go(self) -> None:
        """Free the copies on the device; the backward fetches them again."""
        for copy in self._copies:
            copy.drop()

    def begin(self) -> None:
        """Start all copies back."""
        self._started = True
        for copy in self._copies:
            if copy.uses:
                copy.start()


def memory_of(tensor: Tensor) -> int:
    """The memory that a tensor lies in."""
    return tensor.untyped_storage()._cdata


def form_of(tensor: Tensor) -> Form:
    """How a tensor lies in its memory."""
    read_as = tensor.is_conj(), tensor.is_neg()
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), *read_as


def _as_it_lies(tensor: Tensor) -> Tensor:
    """The numbers in memory of a tensor that may stand for their conjugates, as ``x.conj()`` does."""
    return _flipped(tensor, tensor.is_conj(), tensor.is_neg())


def _flipped(tensor: Tensor, conjugate: bool, negative: bool) -> Tensor:
    tensor = torch._neg_view(tensor) if negative else tensor
    return tensor.conj() if conjugate else tensor
