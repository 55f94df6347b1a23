"""How many of the tokens may lie in host memory: what there is room for, and what is copied while a layer computes.

MEMO (arXiv 2407.12117) takes the largest share that meets both, here with what the first calls of layers were measured
to save::

    a = min(1, (B T - S_input - S_attention) / S_other, (M / N - S_input - S_attention) / S_other)

    S  bytes that a layer saves in one call        B  bytes per second that the link to host memory copies
    M  bytes of host memory for this rank          T  seconds of the layer's forward
    N  calls of layers that are kept at a time: layers of this rank × micro-batches whose backward is still to come

Ranks of one host share what is free there by the calls that they keep, so that an early stage of a pipeline, which
keeps more micro-batches, gets more. Tensor ranks, which run tokens again together, agree on the worst of their numbers.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.data_parallel.buckets import host_memory
from lightning_megatron.data_parallel.buckets.host_memory import GIB
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.host_link import HostLink, link_for
from lightning_megatron.pipeline.schedules.check import activations_in_flight
from lightning_megatron.pipeline.schedules.instructions import Schedule

LEFT = 0.9
"""Share of the free host memory that activations may take; the rest is for whatever else asks for some meanwhile."""


ALMOST = 0.9
"""The share where keeping everything as it lies in memory takes more than that."""


class HostFull(RuntimeError):
    """Activations that host memory has no room for."""


@dataclass(frozen=True)
class CallSizes:
    """One call of a layer, measured.

    Attributes:
        always: bytes of its input and of attention, kept for all tokens.
        other: bytes of everything else.
        seconds: of its forward; infinite where nobody has to wait for copies.
        whole: bytes where nothing is computed again, and tensors are kept as they lie in memory.
    """

    always: float
    other: float
    seconds: float = float("inf")
    whole: float = 0.0


class Neighbours(NamedTuple):
    """Ranks on this host.

    Attributes:
        mine: this rank's place along the pipeline.
        stages: that of each rank here.
        calls: gives, by stage, how many calls of layers it keeps at a time; one list as long as they are the same.
    """

    mine: int
    stages: Sequence[int]
    calls: Callable[[], Sequence[int]]


class Host:
    """This rank's host, as it is."""

    name = property(lambda self: socket.gethostname())

    def link(self, device: torch.device) -> HostLink:
        """The link between a device and its memory."""
        return link_for(device)

    def free(self, held: int) -> float:
        """Bytes that activations could take, if the ``held`` ones of this rank were not there."""
        return float(host_memory.free_bytes(None) + held)

    def stages(self, mine: int) -> Sequence[int]:
        """Places along the pipeline of all ranks here, of which this is at ``mine``; collective over the world."""
        here = self.name
        found = objects.gather((here, mine)) if dist.is_initialized() else [(here, mine)]
        return [stage for host, stage in found if host == here]


@dataclass
class HostBudget:
    """Chooses the share of the tokens, or checks the one that was given.

    Args:
        given: that share; ``None`` to choose it.
        option: what was asked for, in words.
        neighbours: who shares the host.
        layers: of this rank that keep activations there.
        link: to host memory.
        tensor: ranks that run tokens again together, if there are several.
        host: whose memory it is.

    Attributes:
        share: of the tokens that are kept.
        sizes: of the layers measured so far.
    """

    given: float | None
    option: str
    neighbours: Neighbours
    layers: int
    link: HostLink
    tensor: dist.ProcessGroup | None = None
    host: Host = field(default_factory=Host)
    share: float = 0.0
    sizes: dict[str, CallSizes] = field(default_factory=dict)
    _inputs: dict[str, int] = field(default_factory=dict)
    _free: float | None = None
    _limits: tuple[float, float] = (float("inf"), float("inf"))
    _calls: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.share = 0.0 if self.given is None else self.given

    @property
    def bytes_per_second(self) -> float:
        """That the link copies."""
        return self.link.bytes_per_second

    @property
    def chooses(self) -> bool:
        """Whether the share depends on what is measured."""
        return self.given is None

    def wants(self, layer: str, bytes_of_input: int) -> bool:
        """Whether a call of a layer is to be measured: its first, and one that is much longer than those before."""
        if self.sizes and self.neighbours.calls() is not self._calls:
            self._settle()
        return bytes_of_input > 1.2 * self._inputs.get(layer, 0)

    def measured(self, layer: str, bytes_of_input: int, sizes: CallSizes, held: int) -> None:
        """Settle the share by one more call of a layer; collective over the tensor ranks.

        Args:
            layer: its name.
            bytes_of_input: of this call.
            sizes: what it has saved.
            held: bytes that this rank keeps on the host now.

        Raises:
            HostFull: there is too little host memory; says how much, and the largest share.
        """
        if not self._inputs or bytes_of_input > 1.2 * max(self._inputs.values()):
            self._free = None  # other lengths are other runs: what is free is asked again
        self._inputs[layer] = bytes_of_input
        mine = sizes, self.host.free(held)
        everyone = [mine] if self.tensor is None else objects.gather(mine, self.tensor)
        told, free = [found for found, _ in everyone], min(free for _, free in everyone)
        always, other, seconds, whole = zip(*map(astuple, told), strict=True)
        self.sizes[layer] = CallSizes(max(always), max(other), min(seconds), max(whole))
        self._free = free if self._free is None else self._free
        self._settle()
        if self.chooses and len(self.sizes) == self.layers:
            rank_zero_info(self.report())

    @property
    def calls(self) -> int:
        """Calls of layers that this rank keeps at a time."""
        return max(1, self._calls[self.neighbours.mine])

    @property
    def room(self) -> float:
        """Bytes of host memory for this rank."""
        calls = [max(1, count) for count in self._calls]
        everyone = sum(calls[stage] for stage in self.neighbours.stages)
        return LEFT * (self._free or 0.0) * calls[self.neighbours.mine] / everyone

    def _settle(self) -> None:
        self._calls = self.neighbours.calls()
        always, other, seconds = self._typical()
        by_link = (self.bytes_per_second * seconds - always) / other if other else float("inf")
        by_room = (self.room / self.calls - always) / other if other else float("inf")
        self._limits = by_link, by_room
        most = min(1.0, by_room)
        if self.room < self.calls * always or (self.given is not None and self.given > most):
            raise HostFull(self._too_little(always, other, most))
        if self.given is None:
            self.share = max(0.0, min(1.0, by_link, by_room))
            if self.share == 1.0 and self.room < self.calls * max(each.whole for each in self.sizes.values()):
                self.share = ALMOST

    def _typical(self) -> tuple[float, float, float]:
        """Means of bytes over the layers measured; the shortest forward."""
        found = list(self.sizes.values())
        always, other = (sum(values) / len(found) for values in ([x.always for x in found], [x.other for x in found]))
        return always, other, min(x.seconds for x in found)

    def _too_little(self, always: float, other: float, most: float) -> str:
        share = 0.0 if self.given is None else self.given
        need, room = self.calls * (always + share * other), self.room
        way = (
            "use 'auto', which keeps a share of the tokens"
            if not other
            else f"use {{'tokens': {_down(most)}}}, the largest share that fits, or 'auto', which finds it"
            if most >= 0
            else "inputs and outputs of attention alone do not fit; use `activation_recompute='full'`, more ranks that "
            "share a sequence or the layers, or fewer tokens"
        )
        return (
            f"`activation_offload={self.option}` keeps {need / GIB:.3g} GiB in host memory ({self.calls} calls of "
            f"layers, {(always + share * other) / GIB:.3g} GiB each), where {self.host.name} has "
            f"{room / GIB:.3g} GiB for this rank of {len(self.neighbours.stages)}: {way}."
        )

    def report(self) -> str:
        """The choice, with its numbers."""
        if not self.sizes:
            return f"`activation_offload={self.option}`: no layer has been measured yet"
        always, other, seconds = self._typical()
        link = "no copies to wait for"
        if seconds != float("inf") and self.bytes_per_second != float("inf"):
            speed = f"{self.bytes_per_second / 1e9:.3g} GB/s × {seconds:.3g} s"
            link = f"({speed} - {always / GIB:.3g} GiB) / {other / GIB:.3g} GiB = {self._limits[0]:.3g}"
        room = f"({self.room / GIB:.3g} GiB / {self.calls} - {always / GIB:.3g} GiB) / {other / GIB:.3g} GiB"
        return (
            f"`activation_offload={self.option}` keeps a share of {self.share:.3g} of the tokens in host memory: the "
            f"least of 1, by the link {link}, and by the memory of the host {room} = {self._limits[1]:.3g}"
        )


def _down(share: float) -> str:
    """A share with two digits, none too large."""
    return f"{int(100 * share) / 100:g}"


class HeldCalls:
    """Gives how many calls of layers each stage keeps at a time.

    Args:
        layers: of the largest part of each stage.
        schedule: gives that of the step that runs.
    """

    def __init__(self, layers: Sequence[int], schedule: Callable[[], Schedule | None]) -> None:
        self._layers, self._schedule = layers, schedule
        self._known: tuple[Schedule | None, Sequence[int]] = (None, list(layers))

    def __call__(self) -> Sequence[int]:
        schedule = self._schedule()
        if schedule is not None and schedule is not self._known[0]:
            parts = activations_in_flight(schedule)
            self._known = schedule, [n * max(1, held) for n, held in zip(self._layers, parts, strict=True)]
        return self._known[1]


def layers_of_stages(bounds: Sequence[tuple[int, int]], owners: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Chosen layers of the largest part of each stage.

    Args:
        bounds: first layer of each part, and the one past the last.
        owners: the stage of each part.
        chosen: numbers of the layers that keep their activations in host memory.
    """
    found = [0] * (max(owners) + 1)
    for (first, last), owner in zip(bounds, owners, strict=True):
        found[owner] = max(found[owner], sum(first <= number < last for number in chosen))
    return found
