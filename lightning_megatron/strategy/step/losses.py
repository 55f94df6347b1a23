"""What is asked of the losses of a step: are they finite, and equal on the ranks that share a replica?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.messages.collectives import raw_all_reduce

_ALIKE = {torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative


class LossChecks:
    """Looks at losses as they are computed.

    Args:
        inspects: whether to remember which micro-batch was not finite.
        shared_by: tensor-parallel ranks that compute the same loss; ``None`` for one rank.
    """

    def __init__(self, inspects: bool, shared_by: dist.ProcessGroup | None) -> None:
        self._inspects = inspects
        self._shared_by = shared_by
        self._bad: int | None = None

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
        """Compare the loss of the first step over the tensor-parallel ranks; collective over them.

        Args:
            loss: detached scalar; others are left alone.

        Raises:
            RuntimeError: the ranks do not share it: it counts slices somewhere.
        """
        group = self._shared_by
        if group is None or loss.numel() != 1 or not loss.isfinite():
            return
        self._shared_by = None
        found = torch.cat([loss.reshape(1), -loss.reshape(1)]).double()
        extremes = raw_all_reduce(found, group, maximum=True)
        if not extremes.sum() <= _ALIKE.get(loss.dtype, 1e-4) * extremes.abs().max():
            highest, lowest = extremes[0].item(), -extremes[1].item()
            raise RuntimeError(
                f"the loss differs between tensor-parallel ranks, from {lowest:.6g} to {highest:.6g}. Each of them "
                "holds slices of weights, so a sum over `self.parameters()`, or of a layer's weight, counts its own "
                "slices only. Use the optimizer's `weight_decay` instead of a penalty in the loss, or "
                "`tensor_parallel_size=1`."
            )
