"""Norms of a weight over all its inputs where each rank has some of them (see `reading.column_norms`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.mesh.messages.collectives import raw_all_reduce
from lightning_megatron.mesh.pickling import OfOneRank, OtherClass
from lightning_megatron.parallelize.reading.column_norms import parts_with_norms, squares_of


class _Sum(OfOneRank):
    """The group of ranks, and what a call of the module has summed so far.

    Attributes:
        group: the tensor group.
        once: norms of this call by adapter; ``None`` outside of one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.once: dict[str | None, Tensor] | None = None


class SummedNorms(nn.Module):
    """Mixin of a part whose norms are those of whole rows, once for each call of the module that asks for them."""

    _sum: _Sum

    @torch.no_grad()
    def get_weight_norm(
        self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None
    ) -> Tensor:
        """weight: [out, in / group] -> norms [out], a constant for autograd."""
        once = self._sum.once
        if once is not None and adapter_name in once:
            return once[adapter_name]
        squares, kind = squares_of(self, weight, lora_weight, scaling)
        norm = raw_all_reduce(squares, self._sum.group).sqrt().to(kind)
        if once is not None:
            once[adapter_name] = norm
        return norm


def sum_norms(module: nn.Module, group: dist.ProcessGroup) -> tuple[SummedNorms, ...]:
    """Let the parts of a module, which has some of the inputs, give norms over the inputs of all ranks, in place."""
    parts = tuple(part for _, part in parts_with_norms(module))
    for part in parts:
        cls: Any = type(part)
        part.__class__ = _summed_class(cls)
        part._sum = _Sum(group)
    return parts


@contextmanager
def computed_once(parts: tuple[SummedNorms, ...]) -> Iterator[None]:
    """In here, each norm is computed once: the ranks do not call their modules equally often."""
    for part in parts:
        part._sum.once = {}
    try:
        yield
    finally:
        for part in parts:
            part._sum.once = None


@cache
def _summed_class(cls: Any) -> Any:
    bases = (OtherClass, SummedNorms, cls)
    return type(f"Summed{cls.__name__}", bases, {"__module__": cls.__module__, "_twin_of": cls})
