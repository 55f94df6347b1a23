"""The parts of one parameter on the ranks of a group: concatenated to the whole, and cut again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.mesh.messages.collectives import raw_all_gather, raw_all_reduce, raw_broadcast
from lightning_megatron.mesh.parts.boxes import ShardSpec


@dataclass(frozen=True, eq=False)
class ParameterParts:
    """A split parameter, as all ranks of its group hold it.

    Attributes:
        name: of the parameter, for messages.
        specs: the part of each rank of the group.
        group: the ranks that it is split over: the tensor group, or an expert group.
        same_loss: how many neighbouring ranks have one loss together, where the ranks of the group have different ones;
            ``None`` where all have the same.
    """

    name: str
    specs: tuple[ShardSpec, ...]
    group: dist.ProcessGroup
    same_loss: int | None = None

    @property
    def spec(self) -> ShardSpec:
        """This rank's part."""
        return self.specs[self.group.rank()]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.spec.global_shape

    def gather(self, part: Tensor) -> Tensor:
        """The whole tensor, in memory of its own; one all-gather. Parts may differ in size between ranks."""
        return gathered([(self, part)])[0]

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor; padding is zero."""
        return self.spec.slice_full(whole.detach())

    def cut_operand(self, value: Any) -> Any:
        """This rank's part of a tensor that meets the whole one element by element; anything else as it is."""
        return self.cut(value.expand(self.shape)) if isinstance(value, Tensor) and value.ndim else value

    def block_dim(self) -> int | None:
        """The dim that is cut into equal blocks in the order of ranks, if the parts are such blocks."""
        shape = self.shape
        return next((dim for dim in range(len(shape)) if self._is_cut_along(dim)), None)

    def _is_cut_along(self, dim: int) -> bool:
        block, length = self.spec.local_shape[dim], self.shape[dim]
        for rank, spec in enumerate(self.specs):
            first = min(rank * block, length)
            if spec != ShardSpec.along(self.shape, dim, [(first, min(first + block, length))], block):
                return False
        return block * len(self.specs) >= length


@dataclass(frozen=True, eq=False)
class HeldParts(ParameterParts):
    """A tensor of which some ranks of a group hold parts, in boxes of any form, and others nothing.

    Example, the momentum of a weight [3, 4] that two replicas of the second of two stages share out, over four ranks::

        holders (2, 3)    specs (6 elements, 6 elements)     own: on ranks 0 and 1 none, on 2 and 3 theirs

    Attributes:
        holders: places in the group of the ranks that send their part, in the order of ``specs``: every element is
            held by one of them at least.
        own: this rank's part.
    """

    holders: tuple[int, ...] = ()
    own: ShardSpec = field(default_factory=lambda: ShardSpec.whole(()))

    @property
    def spec(self) -> ShardSpec:
        """This rank's part."""
        return self.own

    def gather(self, part: Tensor) -> Tensor:
        """The whole tensor, in memory of its own; one broadcast for each holder."""
        whole = part.new_zeros(self.shape)
        for holder, spec in zip(self.holders, self.specs, strict=True):
            sent = part.detach().contiguous() if self.group.rank() == holder else part.new_empty(spec.local_shape)
            raw_broadcast(sent, dist.get_global_rank(self.group, holder), self.group)
            spec.write_into(whole, sent)
        return whole


def gathered(parts: Sequence[tuple[ParameterParts, Tensor]]) -> list[Tensor]:
    """Whole tensors, in memory of their own; one all-gather for each type of number. Collective over their group.

    Args:
        parts: this rank's, with how all ranks hold each; of one group, and in the same order on all of its ranks.
    """
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for _, tensor in parts):
        chosen = [(place, each, part) for place, (each, part) in enumerate(parts) if part.dtype == dtype]
        group = chosen[0][1].group
        sizes = [[math.prod(each.specs[rank].local_shape) for _, each, _ in chosen] for rank in range(group.size())]
        longest = max(map(sum, sizes))
        flats = [part.detach().reshape(-1) for *_, part in chosen]
        flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        padded = flat if flat.numel() == longest else F.pad(flat, (0, longest - flat.numel()))
        rows = raw_all_gather(padded, 0, group).view(group.size(), longest)
        found |= {place: part.new_empty(each.shape) for place, each, part in chosen}
        for rank, (row, line) in enumerate(zip(rows, sizes, strict=True)):
            for (place, each, _), values in zip(chosen, row[: sum(line)].split(line), strict=True):
                each.specs[rank].write_into(found[place], values.view(each.specs[rank].local_shape))
    return [found[place] for place in range(len(parts))]


class Gathered(torch.autograd.Function):
    """The whole parameter from its parts; its gradient, equal on all ranks, is cut again."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, parts: ParameterParts, gather: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.parts = parts
        return gather(local)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.parts.cut(grad), None, None


class GatheredForEach(Gathered):
    """The same where the ranks of the group have losses of their own: the sum of their gradients is cut.

    Ranks with the same loss have the same gradient, of which each counts for its part: copies of a part in other groups
    are summed later, and all ranks that share the loss are in one group or another.
    """

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.parts.cut(raw_all_reduce(grad, ctx.parts.group)) / ctx.parts.same_loss, None, None


class CutToPart(torch.autograd.Function):
    """This rank's part of a whole tensor that all ranks have; its gradient is gathered on all of them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, parts: ParameterParts) -> Tensor:
        ctx.parts = parts
        return parts.cut(whole).clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.parts.gather(grad), None
