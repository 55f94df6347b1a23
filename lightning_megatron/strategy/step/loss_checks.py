"""What is asked of a step: are its losses finite, and its batch and loss equal on the ranks that share a replica?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.batches import checksum
from lightning_megatron.mesh.messages.collectives import Started, start_all_reduce

_ALIKE = {torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative


class LossChecks:
    """Looks at batches and losses as they come.

    Args:
        inspects: whether to remember which micro-batch was not finite.
        shared_by: tensor-parallel ranks that compute the same loss of the same batch; ``None`` for one rank.
        reads: whether they exist.
        over_context: whether they are context ranks instead.

    Attributes:
        compares: whether several ranks do.
    """

    def __init__(
        self, inspects: bool, shared_by: dist.ProcessGroup | None, *, reads: bool = True, over_context: bool = False
    ) -> None:
        self._inspects = inspects
        self._shared_by, self.compares = shared_by, shared_by is not None
        self._reads = reads
        self._over_context = over_context
        self._bad: int | None = None
        self._known: set[str] = set()
        self._mark: float | Tensor = 0.0
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

    def take_batch(self, batch: Any, step: str, device: torch.device) -> None:
        """Take note of the batch of a step, to be compared with its loss; at once in the first step of each kind, which
        might not end where ranks compute on different batches. Collective over the tensor-parallel ranks then.

        Args:
            batch: before the step has seen it.
            step: name of the user's step.
            device: where tensors live.

        Raises:
            RuntimeError: the ranks do not share this batch, or did not share one before.
        """
        group = self._shared_by
        if group is None:
            return
        self._mark = checksum(batch)
        if step not in self._known:
            self._start(torch.zeros((), device=device), group)
            self.read()

    def compare(self, loss: Tensor | None, step: str, device: torch.device) -> None:
        """Compare batch and loss over the tensor-parallel ranks; collective over them, in every step.

        What the first step of each kind gives is compared at once, before it can change a weight. Later comparisons
        travel while the step runs, and are read in the next one.

        Args:
            loss: detached scalar, if there is one; others are left alone.
            step: name of the user's step.
            device: where tensors live.

        Raises:
            RuntimeError: the ranks do not share this loss or batch, or those of the step before.
        """
        group = self._shared_by
        if group is None:
            return
        scalar = torch.zeros((), device=device) if loss is None or loss.numel() != 1 else loss.reshape(())
        self._start(scalar, group)
        if step not in self._known:
            self._known.add(step)
            self.read()

    def _start(self, loss: Tensor, group: dist.ProcessGroup) -> None:
        self.read()
        wide, mark = loss.double(), torch.as_tensor(self._mark, dtype=torch.float64, device=loss.device)
        found = torch.stack([wide, -wide, (~loss.isfinite()).double(), mark, -mark]).nan_to_num(0.0, 0.0, 0.0)
        extremes, work = start_all_reduce(found, group, maximum=True)
        self._under_way = (extremes, work, _ALIKE.get(loss.dtype, 1e-4))

    def read(self) -> None:
        """Wait for a comparison under way.

        Raises:
            RuntimeError: the ranks' batches or losses differ.
        """
        if self._under_way is None:
            return
        (extremes, work, tolerance), self._under_way = self._under_way, None
        if work is not None:
            work.wait()
        if not self._reads:
            return
        highest, below, broken, mark, opposite = extremes.tolist()
        if mark != -opposite:
            if self._over_context:
                raise RuntimeError(
                    "the context ranks of one replica loaded different batches. All of them must load the same one, "
                    "whole: seed the sampler and what is drawn in a dataset or collator (`L.seed_everything`), let "
                    "Lightning add its distributed sampler, or shard by `trainer.strategy.distributed_sampler_kwargs`."
                )
            raise RuntimeError(
                "the tensor-parallel ranks of one replica loaded different batches. All of them must load the same "
                "one: seed the sampler and what is drawn in a dataset or collator (`L.seed_everything`), let Lightning "
                "add its distributed sampler, or shard by `trainer.strategy.distributed_sampler_kwargs` instead of the "
                "global rank."
            )
        lowest = -below
        if broken or highest - lowest <= tolerance * max(abs(highest), abs(lowest)):
            return
        if self._over_context:
            raise RuntimeError(
                f"the loss differs between context ranks, from {lowest:.6g} to {highest:.6g}, on the same batch. Each "
                "of them computes the whole batch's loss: code that asks for its rank, or draws random numbers on some "
                "ranks only, must not change it. Use `context_parallel_size=1` otherwise."
            )
        raise RuntimeError(
            f"the loss differs between tensor-parallel ranks, from {lowest:.6g} to {highest:.6g}, on the same batch. "
            "Each of them holds slices of weights: code that reaches past torch's functions (NumPy, an extension, a "
            "module's `forward` that reads weights of another layer) may compute with its own slice only. Read weights "
            "by functions of torch in the step itself, or use `tensor_parallel_size=1`. Ranks that draw different "
            "random numbers differ as well."
        )
