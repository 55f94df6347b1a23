# mypy: disable-error-code="override,assignment"
"""A process group of which only one rank exists: what it would send is written down, and nothing is sent.

A rehearsal runs one rank's own code, so every collective is called as in a real launch; here it returns at once. The
other ranks are taken to hold what this rank holds: a sum leaves its tensor as it is, a gather repeats it. That is true
of everything ranks agree on (seeds, sizes, plans), and values of activations do not exist in a rehearsal anyway.

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

BACKEND = "rehearsal"


class Entry(NamedTuple):
    """One kind of communication: what, in which phase, with whom, how large.

    Attributes:
        phase: ``setup``, ``step`` or ``optimizer``.
        operation: such as ``all-reduce``.
        ranks: global ranks of the group; for a transfer the ranks of the pipeline group.
        peer: global rank on the other side of a transfer, -1 for a collective.
        bytes: of the whole tensor: what is summed, broadcast or transferred, the result of a gather, the operand of a
            scatter.
    """

    phase: str
    operation: str
    ranks: tuple[int, ...]
    peer: int
    bytes: int


@dataclass
class Ledger:
    """Counts what a rank would have sent.

    Attributes:
        counts: how often each kind of communication happened, in order of first appearance.
        phase: under which new entries are put.
    """

    counts: dict[Entry, int] = field(default_factory=dict)
    phase: str = "setup"

    def write(self, group: dist.ProcessGroup, operation: str, tensors: Sequence[Tensor], peer: int = -1) -> None:
        """Note one operation of ``group`` on ``tensors``."""
        self.write_bytes(group, operation, sum(tensor.numel() * tensor.element_size() for tensor in tensors), peer)

    def write_bytes(self, group: dist.ProcessGroup, operation: str, size: int, peer: int = -1) -> None:
        """Note one operation of ``group`` on ``size`` bytes."""
        ranks = tuple(dist.get_process_group_ranks(group))
        entry = Entry(self.phase, operation, ranks, ranks[peer] if peer >= 0 else -1, size)
        self.counts[entry] = self.counts.get(entry, 0) + 1


class _Done(dist.Work):
    """Work that was finished when it began."""

    def wait(self, timeout: Any = None) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


def _copy(target: Tensor, source: Tensor) -> None:
    """Give a real tensor its value; tensors without values have nothing to copy."""
    if not isinstance(target, FakeTensor) and not isinstance(source, FakeTensor):
        target.detach().copy_(source.detach().view_as(target))


class PaperGroup(dist.ProcessGroup):
    """A process group that writes operations into a ledger.

    Args:
        rank: this rank's number in the group.
        size: ranks in the group.
        name: torch's name of the group.
        ledger: where operations are noted.
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
        """Ranks in the group."""
        return self._size

    def getBackendName(self) -> str:
        """Name of the backend."""
        return BACKEND

    def _note(self, operation: str, tensors: Sequence[Tensor], peer: int = -1) -> dist.Work:
        self._ledger.write(self, operation, tensors, peer)
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Sum over the group."""
        return self._note("all-reduce", tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Copy from one rank to all."""
        return self._note("broadcast", tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all."""
        return self._note("barrier", [])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Collect everyone's tensor in a list."""
        for output, own in zip(outputs, inputs, strict=True):
            for target in output:
                _copy(target, own)
        return self._note("all-gather", [target for output in outputs for target in output])

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        """Collect everyone's tensor in one."""
        if not isinstance(output, FakeTensor):
            for block in output.view(self._size, -1):
                _copy(block, own.reshape(-1))
        return self._note("all-gather", [output])

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        """Sum over the group and keep one block."""
        if not isinstance(output, FakeTensor) and not isinstance(whole, FakeTensor):
            _copy(output, whole.view(self._size, -1)[self.rank()])
        return self._note("reduce-scatter", [whole])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """Sum lists over the group and keep one entry."""
        for output, blocks in zip(outputs, inputs, strict=True):
            _copy(output, blocks[self.rank()])
        return self._note("reduce-scatter", [block for blocks in inputs for block in blocks])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Collect everyone's tensor on one rank."""
        for output, own in zip(outputs, inputs, strict=False):
            for target in output:
                _copy(target, own)
        return self._note("gather", inputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """Hand out one rank's tensors."""
        for output, blocks in zip(outputs, inputs, strict=False):
            _copy(output, blocks[self.rank()])
        return self._note("scatter", outputs)

    def alltoall_base(
        self, output: Tensor, own: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        """Everyone sends a block to everyone."""
        if output.shape == own.shape:
            _copy(output, own)
        return self._note("all-to-all", [own])

    all_to_all_single = alltoall_base

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Send to one rank of the group."""
        return self._note("send", tensors, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Receive from one rank of the group."""
        return self._note("receive", tensors, peer)


class _Maker:
    """What torch calls for every new group; knows the ledger of the rehearsal under way."""

    ledger: Ledger | None = None

    def __call__(self, options: Any, _: Any) -> PaperGroup:
        if self.ledger is None:
            raise RuntimeError(f"the backend {BACKEND!r} exists only inside `rehearse`; use 'gloo' or 'nccl'.")
        return PaperGroup(options.group_rank, options.group_size, options.group_id, self.ledger)


@contextmanager
def paper_world(rank: int, world_size: int) -> Iterator[Ledger]:
    """Be ``rank`` of ``world_size`` ranks that do not exist, and write down what is sent to them.

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
