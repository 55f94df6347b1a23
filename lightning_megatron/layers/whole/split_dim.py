"""One dim of a tensor, cut over a process group: which indices are here, and how parts and whole become each other.

Rank r of a group holds the r-th block of the dim. Blocks are of equal size; what lies past the end of the dim is
padding, so that parts may be uneven. 301 classes in blocks of 256, over two ranks::

    rank 0   indices   0 .. 255           rank 1   indices 256 .. 300, then 211 entries of padding

Everything that reads a whole tensor is the same on all ranks, and so is the gradient of it. The two conversions are
adjoint under that convention, as ``gather_from_group`` and ``split_to_group`` of the collectives are:

=========  ==========================  ==========================  =======================
name       forward                     backward                    layout
=========  ==========================  ==========================  =======================
``join``   all-gather, padding off     own block, padded           split -> whole
``take``   own block, padded           all-gather, padding off     whole -> split
=========  ==========================  ==========================  =======================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.mesh.messages.collectives import (
    copy_to_group,
    gather_from_group,
    raw_all_gather,
    reduce_from_group,
)


@dataclass(frozen=True)
class SplitDim:
    """A dim of ``length`` indices, cut over ``group``.

    Attributes:
        group: the process group whose ranks hold the parts.
        length: global size of the dim, padding not counted.
    """

    group: dist.ProcessGroup
    length: int

    def span(self, block: int) -> tuple[int, int]:
        """First index of this rank's block of ``block`` entries, and how many of them are not padding."""
        start = min(self.group.rank() * block, self.length)
        return start, max(0, min(block, self.length - start))

    def held(self, local: Tensor, dim: int) -> Tensor:
        """The entries that are not padding: [.., block, ..] -> [.., held, ..]; a view."""
        return local.narrow(dim, 0, self.span(local.shape[dim])[1])

    def pad(self, held: Tensor, dim: int, block: int) -> Tensor:
        """The held entries, followed by zeros: [.., held, ..] -> [.., block, ..]."""
        missing = block - held.shape[dim]
        if not missing:
            return held
        return F.pad(held.movedim(dim, -1), (0, missing)).movedim(-1, dim)

    def join(self, local: Tensor, dim: int) -> Tensor:
        """The whole tensor, on every rank: [.., block, ..] -> [.., length, ..]; a collective."""
        return gather_from_group(local, dim, self.group).narrow(dim, 0, self.length)

    def take(self, whole: Tensor, dim: int, block: int) -> Tensor:
        """This rank's block of a whole tensor: [.., length, ..] -> [.., block, ..]; its backward is a collective."""
        if whole.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, _Take.apply(whole, self, dim, block))
        return self.pad(self.take_held(whole, dim, block), dim, block)

    def take_held(self, whole: Tensor, dim: int, block: int) -> Tensor:
        """The same without padding; a view, outside of autograd's rules above."""
        return whole.narrow(dim, *self.span(block))

    def summed(self, partial: Tensor) -> Tensor:
        """The sum over the ranks of what each has of it, on every rank; the gradient is the same on all."""
        return reduce_from_group(partial, self.group)

    def shared(self, whole: Tensor) -> Tensor:
        """A whole tensor that every rank uses with its own part; its gradient is summed over the ranks."""
        return copy_to_group(whole, self.group) if whole.requires_grad else whole

    def dtype_of(self, local: Tensor) -> torch.dtype:
        """That of the tensor of global shape, which is its part's."""
        return local.dtype

    def in_blocks(self, group: dist.ProcessGroup) -> SplitDim:
        """The same dim where each rank of ``group`` holds one block of what is here (sequence parallelism)."""
        raise NotImplementedError(f"{type(self).__name__} cannot be split further")

    def together(self) -> SplitDim:
        """The same dim where each rank of that group holds all of its blocks."""
        raise NotImplementedError(f"{type(self).__name__} has no blocks")

    def refuse_bypass(self, shape: Sequence[int]) -> None:
        """Called where a function that passes by the rules was given a tensor of this ``shape`` that needs a gradient.

        Its gradient is known here; kinds of splits for which it is not raise.
        """


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, split: SplitDim, dim: int, block: int) -> Tensor:
        ctx.split, ctx.dim = split, dim
        return split.pad(split.take_held(whole, dim, block), dim, block).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return raw_all_gather(grad, ctx.dim, ctx.split.group).narrow(ctx.dim, 0, ctx.split.length), None, None, None
