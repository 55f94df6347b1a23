# mypy: disable-error-code="override,assignment"
"""A process group with only one rank: it records communication in a ledger, and sends nothing.

A rehearsal runs the code of one rank, which calls every collective as in a real launch; here each returns at once. The
other ranks are assumed to have the same values as this rank: a gather repeats its tensor, but a sum leaves it
unchanged. This is right for all values on which ranks agree (seeds, sizes, plans); activations have no values in a
rehearsal.

::

    rank 1234   all_reduce(x, group) ──▶ ledger: all-reduce, 104 MB, [1232 .. 1239]   ──▶ done
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_megatron.pipeline.elsewhere.away import STATE

BACKEND = "rehearsal"


class LedgerEntry(NamedTuple):
    """One kind of communication: operation, phase, ranks and size.

    Attributes:
        phase: ``setup``, ``step`` or ``optimizer``.
        operation: such as ``all-reduce``.
        ranks: global ranks of the group; for a transfer the ranks of the pipeline group.
        peer: global rank on the other side of a transfer, -1 for a collective.
        bytes: size of the full tensor: the operand of a reduction, broadcast, scatter or transfer, the result of an
            all-gather.
    """

    phase: str
    operation: str
    ranks: tuple[int, ...]
    peer: int
    bytes: int


@dataclass
class Ledger:
    """Counts the communication of a rank.

    Attributes:
        counts: kind of communication -> number of calls, in order of first appearance.
        phase: phase of new entries.
    """

    counts: dict[LedgerEntry, int] = field(default_factory=dict)
    phase: str = "setup"

    def write(self, group: dist.ProcessGroup, operation: str, tensors: Sequence[Tensor], peer: int = -1) -> None:
        """Record one operation of ``group`` on ``tensors``; ``peer`` is a rank in the group."""
        self.write_bytes(group, operation, sum(tensor.numel() * tensor.element_size() for tensor in tensors), peer)

    def write_bytes(self, group: dist.ProcessGroup, operation: str, size: int, peer: int = -1) -> None:
        """Record one operation of ``group`` on ``size`` bytes; ``peer`` is a rank in the group. Not where only shapes
        are wanted, of layers of stages that in a launch tell them.
        """
        if STATE.paused:
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        entry = LedgerEntry(self.phase, operation, ranks, ranks[peer] if peer >= 0 else -1, size)
        self.counts[entry] = self.counts.get(entry, 0) + 1


class _Done(dist.Work):
    """Work that is complete from the start."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always true."""
        return True


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy a real tensor into another; does nothing for fake tensors, which have no values."""
    if not isinstance(target, FakeTensor) and not isinstance(source, FakeTensor):
        target.detach().copy_(source.detach().view_as(target))


class PaperGroup(dist.ProcessGroup):
    """A process group that records operations in a ledger.

    Args:
        rank: this rank in the group.
        size: number of ranks in the group.
        name: torch's name of the group.
        ledger: records the operations.
    """

    def __init__(self, rank: int, size: int, name: str, ledger: Ledger) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._size = size
        self._name = name
        self._ledger = ledger

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    def size(self) -> int:
        """Number of ranks in the group."""
        return self._size

    def getBackendName(self) -> str:
        """Name of the backend."""
        return BACKEND

    def _note(self, operation: str, tensors: Sequence[Tensor], peer: int = -1) -> dist.Work:
        self._ledger.write(self, operation, tensors, peer)
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Record an all-reduce; the tensors stay unchanged."""
        return self._note("all-reduce", tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Record a broadcast; the tensors stay unchanged."""
        return self._note("broadcast", tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Record a barrier."""
        return self._note("barrier", [])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Record an all-gather into lists; each entry becomes a copy of this rank's tensor."""
        for output, own in zip(outputs, inputs, strict=True):
            for target in output:
                _copy(target, own)
        return self._note("all-gather", [target for output in outputs for target in output])

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        """Record an all-gather into one tensor; each block becomes a copy of this rank's tensor."""
        if not isinstance(output, FakeTensor):
            for block in output.view(self._size, -1):
                _copy(block, own.reshape(-1))
        return self._note("all-gather", [output])

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        """Record a reduce-scatter of one tensor; the output becomes this rank's block of it."""
        if not isinstance(output, FakeTensor) and not isinstance(whole, FakeTensor):
            _copy(output, whole.view(self._size, -1)[self.rank()])
        return self._note("reduce-scatter", [whole])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """Record a reduce-scatter of lists; the output becomes this rank's entry."""
        for output, blocks in zip(outputs, inputs, strict=True):
            _copy(output, blocks[self.rank()])
        return self._note("reduce-scatter", [block for blocks in inputs for block in blocks])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Record a gather; on the destination each entry becomes a copy of this rank's tensor."""
        for output, own in zip(outputs, inputs, strict=False):
            for target in output:
                _copy(target, own)
        return self._note("gather", inputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """Record a scatter; on the source the output becomes its own entry."""
        for output, blocks in zip(outputs, inputs, strict=False):
            _copy(output, blocks[self.rank()])
        return self._note("scatter", outputs)

    def alltoall_base(
        self, output: Tensor, own: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        """Record an all-to-all; the output becomes a copy of this rank's input if the shapes match."""
        if output.shape == own.shape:
            _copy(output, own)
        return self._note("all-to-all", [own])

    all_to_all_single = alltoall_base

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Record a send to a rank of the group."""
        return self._note("send", tensors, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Record a receive from a rank of the group; the tensors stay unchanged."""
        return self._note("receive", tensors, peer)


class _Maker:
    """Factory that torch calls for every new group; it holds the ledger of the rehearsal under way."""

    ledger: Ledger | None = None

    def __call__(self, options: Any, _: Any) -> PaperGroup:
        if self.ledger is None:
            raise RuntimeError(f"the backend {BACKEND!r} exists only inside `rehearse`; use 'gloo' or 'nccl'.")
        return PaperGroup(options.group_rank, options.group_size, options.group_id, self.ledger)


@contextmanager
def paper_world(rank: int, world_size: int) -> Iterator[Ledger]:
    """Initialize the default process group as ``rank`` of ``world_size``, and record communication in a ledger.

    Raises:
        RuntimeError: this process is part of a real process group.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a rehearsal needs a process of its own: this one is part of a process group already. Rehearse before "
            "the Trainer starts, or with `lightning-megatron rehearse`."
        )
    maker = dist.Backend._plugins[BACKEND.upper()].creator_fn if hasattr(dist.Backend, BACKEND.upper()) else _Maker()
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, maker, extended_api=True, devices=["cpu"])
    maker.ledger = Ledger()
    try:
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=world_size)
        yield maker.ledger
    finally:
        maker.ledger = None
        if dist.is_initialized():
            dist.destroy_process_group()
