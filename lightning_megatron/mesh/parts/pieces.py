"""Logical tensors of which this rank holds some boxes: what checkpoints write and read.

A tensor-parallel slice, a flat shard of an optimizer's moments and an unsplit tensor are all a :class:`PiecedTensor`,
so checkpoints depend neither on how layers are split nor on how optimizer state is sharded. Its shape is the logical
one, but only the boxes that this rank holds have memory.

Example, a weight [3, 4] over two ranks, cut in the middle of its second row::

    rank 0  a a a a        boxes (0,0)+(1,4)  (1,0)+(1,2)      flat local tensor of 6 elements
            a a b b
    rank 1  b b b b        boxes (1,2)+(1,2)  (2,0)+(1,4)      flat local tensor of 6 elements
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.mesh.parts.boxes import Box, ShardSpec


@dataclass(frozen=True)
class PiecedTensor:
    """A logical tensor of which this rank holds the boxes of ``spec``.

    It is not a ``Tensor`` and does not support computations. Several ranks may hold the same elements, in equal or
    different boxes; a checkpoint writes each element once, and loads it on all of these ranks.

    Attributes:
        spec: the logical shape, and the boxes on this rank.
        local: memory of the boxes, contiguous, shape ``spec.local_shape``.

    Raises:
        ValueError: ``local`` has another shape than ``spec.local_shape``, or is not contiguous.
    """

    spec: ShardSpec
    local: Tensor

    def __post_init__(self) -> None:
        if tuple(self.local.shape) != self.spec.local_shape:
            raise ValueError(
                f"local tensor of shape {tuple(self.local.shape)} given for pieces of local shape "
                f"{self.spec.local_shape} (logical {self.spec.global_shape}); pass the tensor that the specification "
                "was made for."
            )
        if not self.local.is_contiguous():
            raise ValueError(
                f"local tensor of shape {tuple(self.local.shape)} with strides {self.local.stride()} is not "
                "contiguous; boxes are addressed in contiguous memory, so pass `local.contiguous()`."
            )

    @classmethod
    def whole(cls, tensor: Tensor) -> PiecedTensor:
        """An unsplit tensor, as a single box."""
        return cls(ShardSpec.whole(tensor.shape), tensor.detach().contiguous())

    @property
    def shape(self) -> torch.Size:
        """Logical shape."""
        return torch.Size(self.spec.global_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self.local.dtype

    def part(self, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """View of the rectangle of shape ``shape`` at ``offset`` in the logical tensor.

        Raises:
            KeyError: no single box on this rank contains the rectangle.
        """
        for box in self.spec.boxes:
            if _contains(box, offset, shape):
                return self.part_of(box, offset, shape)
        raise KeyError(f"offset {tuple(offset)}, shape {tuple(shape)} is in none of the boxes {self.spec.boxes}")

    def part_of(self, box: Box, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The same view through the given box, for elements that this rank holds several times (repeated heads)."""
        start = [o - b for o, b in zip(offset, box.offset, strict=True)]
        view = box.of_local(self.local.detach())
        return view[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]

    def empty_like(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> PiecedTensor:
        """A piece of the same specification with new memory, filled with zeros, for a checkpoint to load into."""
        local = torch.zeros(self.spec.local_shape, dtype=dtype or self.dtype, device=device or self.local.device)
        return PiecedTensor(self.spec, local)

    def clear_padding(self) -> None:
        """Set elements in no box to zero, in memory that is about to be loaded into; the others may be, too."""
        if self.spec.numel < self.local.numel():
            self.local.detach().zero_()

    def on_host(self) -> PiecedTensor:
        """A copy in CPU memory, which later steps do not change."""
        return PiecedTensor(self.spec, self.local.detach().to("cpu", copy=True))


def as_pieces(value: Tensor | PiecedTensor) -> PiecedTensor:
    """``value`` itself, or a plain tensor as one unsplit piece."""
    return value if isinstance(value, PiecedTensor) else PiecedTensor.whole(value)


def plain_if_whole(value: PiecedTensor) -> Tensor | PiecedTensor:
    """The tensor itself where all of it is here, for code that knows of no pieces."""
    return value.local if value.spec.is_whole else value


def _contains(box: Box, offset: Sequence[int], shape: Sequence[int]) -> bool:
    return all(o >= b and o + n <= b + m for o, n, b, m in zip(offset, shape, box.offset, box.shape, strict=True))
