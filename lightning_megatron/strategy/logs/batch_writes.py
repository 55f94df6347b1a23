"""What the user's step writes into its batch: each run of the step finds the batch as it came.

A stage runs the step once for each of its chunks of layers, and once for each micro-batch, where one process runs it
once. ``batch["tokens"].add_(1)`` and ``batch["step"] += 1`` would be done as often, and a tensor that all samples share
would be written by each micro-batch. So a run is given other containers, and copies of small tensors::

    part ──copies──▶ step, chunk 0          what it writes is thrown away
    part ──copies──▶ step, last chunk       what it writes reaches the batch, when all micro-batches are done

Large tensors are copied once a step was seen to write into one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.mesh.batches import map_tensors

_SMALL = 1 << 16  # numbers in a tensor


class _Given(NamedTuple):
    """A tensor of a batch, the one that a run has in its place, and whether that has memory of its own."""

    tensor: Tensor
    given: Tensor
    is_copy: bool


class BatchWrites:
    """Copies batches for runs of the step, and knows whether it writes into them."""

    def __init__(self) -> None:
        self._writes = False
        self._done: list[tuple[Tensor, Tensor]] = []

    def copied(self, part: Any) -> tuple[Any, list[_Given]]:
        """A batch for one run, and what it was given of tensors."""
        pairs: list[_Given] = []

        def copy(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                return tensor
            small = self._writes or tensor.numel() <= _SMALL
            found = tensor.clone() if small else tensor.data  # whose writes do not count for the other rows'
            pairs.append(_Given(tensor, found, small))
            return found

        return map_tensors(part, copy), pairs

    def note(self, pairs: Sequence[_Given], *, last: bool, alone: Callable[[Tensor], bool]) -> None:
        """Called behind a run.

        Args:
            pairs: what :meth:`copied` gave for it.
            last: whether it was the last on this batch.
            alone: whether nothing else is run on a tensor.

        Raises:
            RuntimeError: it has written into a large tensor that it is run on again.
        """
        for tensor, copy, is_copy in pairs:
            if copy.is_inference() or copy._version == 0:
                continue
            if is_copy:
                self._done += [(tensor, copy)] if last else []
            elif not alone(tensor):
                raise RuntimeError(
                    f"the step writes into a tensor of its batch, of shape {tuple(tensor.shape)}, which it is run on "
                    "again for other layers or micro-batches. Write into a copy of it (`tensor.clone()`), or let "
                    "`collate_fn` do it."
                )
            self._writes |= tensor.numel() > _SMALL

    def finish(self) -> None:
        """Called when all micro-batches are done: what the step wrote reaches the batch."""
        done, self._done = self._done, []
        with torch.no_grad():
            for tensor, copy in done:
                tensor.copy_(copy)
