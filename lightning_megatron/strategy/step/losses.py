"""What is asked of the losses of a step: are they finite, and equal on the ranks that share a replica?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.messages.collectives import Started, start_all_reduce

_ALIKE = {torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative


class LossChecks:
    """Looks at losses as they are computed.

    Args:
        inspects: whether to remember which micro-batch was not finite.
        shared_by: tensor-parallel ranks that compute the same loss; ``None`` for one rank.
        reads: whether they exist.
    """

    def __init__(self, inspects: bool, shared_by: dist.ProcessGroup | None, *, reads: bool = True) -> None:
        self._inspects = inspects
        self._shared_by, self._reads = shared_by, reads
        self._bad: int | None = None
        self._compared = False
        self._under_way: tuple[Tensor, Started | None, float] | None = None

    def note(self, losses: Sequence[Tensor]) -> None:
        """Remember the first micro-batch whose loss is not finite, if anybody will ask.

        Args:
            losses: detached, one per micro-batch.
        """
        if self._inspects and self._bad is None:
            finite = torch.stack([loss.isfinite().all() for loss in losses]).tolist()
            self._bad = next((index for index, fine in enumerate(finite) if not fine), None)

    def take_bad(self) -> int | None:
        """The first micro-batch since the last call whose loss was not finite."""
        bad, self._bad = self._bad, None
        return bad

    def compare(self, loss: Tensor) -> None:
        """Compare the loss over the tensor-parallel ranks; collective over them, in every step.

        The first step's is compared at once, before it can change a weight. Later comparisons travel while the step
        runs, and are read in the next one.

        Args:
            loss: detached scalar; others are left alone.

        Raises:
            RuntimeError: the ranks do not share this loss, or that of the step before: it counts slices somewhere.
        """
        group = self._shared_by
        if group is None or loss.numel() != 1:
            return
        self.read()
        found = torch.cat([loss.reshape(1), -loss.reshape(1), (~loss.isfinite()).reshape(1).to(loss.dtype)]).double()
        extremes, work = start_all_reduce(found.nan_to_num(0.0, 0.0, 0.0), group, maximum=True)
        self._under_way = (extremes, work, _ALIKE.get(loss.dtype, 1e-4))
        if not self._compared:
            self._compared = True
            self.read()

    def read(self) -> None:
        """Wait for a comparison under way.

        Raises:
            RuntimeError: the ranks' losses differ.
        """
        if self._under_way is None:
            return
        (extremes, work, tolerance), self._under_way = self._under_way, None
        if work is not None:
            work.wait()
        if not self._reads:
            return
        highest, below, broken = extremes.tolist()
        lowest = -below
        if broken or highest - lowest <= tolerance * max(abs(highest), abs(lowest)):
            return
        raise RuntimeError(
            f"the loss differs between tensor-parallel ranks, from {lowest:.6g} to {highest:.6g}. Each of them holds "
            "slices of weights and computes its term from those: a sum over `self.parameters()`, or of a layer's "
            "weight, counts its own slices only. Use the optimizer's `weight_decay` instead of a penalty in the loss, "
            "or `tensor_parallel_size=1`. Ranks that load different batches, or draw different random numbers, "
            "differ as well."
        )
