"""Splits modules that are cut like a linear layer, although they multiply by no weight (see `reading.divisible`).

The module keeps its code, and gets this rank's slices of its tensors; around its ``forward`` stand the collectives of a
column-parallel or a row-parallel linear layer::

    by output    x ─[copy, or gather tokens]─ own code on slices ─[gather]─ y of these features
    by input     x of these features ─ own code on slices ─[sum, or sum and split tokens]─ y

Tensors that stay whole act on a part of the features on every rank, so their gradients are partial sums. What the
module adds whatever its input, such as a bias, is added by the first rank of the group alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.layers.all_here import all_tokens_here
from lightning_megatron.layers.linear import RowSharding
from lightning_megatron.layers.table import ParameterSharding, ShardTable, apply_specs
from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.messages.collectives import (
    check_divisible,
    copy_to_group,
    gather_for_shards,
    gather_from_group,
    reduce_from_group,
    scatter_partial,
)
from lightning_megatron.mesh.parts.boxes import Range, ShardSpec, block_range
from lightning_megatron.mesh.pickling import OfOneRank, OtherClass
from lightning_megatron.parallelize.reading.divisible import Divisible, set_sizes, tensors_of
from lightning_megatron.parallelize.swap.summed_norms import SummedNorms, computed_once, sum_norms

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ByOutput(OfOneRank):
    """How a module runs whose output features are split.

    Attributes:
        group: the tensor group.
        token_dim: dim of the tokens where the input has a part of them, else ``None``.
        reduces: whether the input's gradient is summed here; ``False`` where a module around it does so.
        gathers: whether the output is gathered.
        rows: output features to keep where the tensors stay whole, else ``None``.
    """

    group: dist.ProcessGroup
    token_dim: int | None
    reduces: bool
    gathers: bool
    rows: tuple[Range, ...] | None

    @property
    def gather_dim(self) -> int | None:
        """Dim along which the input is gathered, or None when every rank has all of it."""
        return None if all_tokens_here() else self.token_dim

    def run(self, product: Product, x: Tensor) -> Tensor:
        """x: [.., in] -> [.., out / group], or [.., out] where it is gathered."""
        if isinstance(x, WholeTensor) and x.is_by_rows:
            split = None if self.gather_dim is None else x.spread.together()
            return x.like(self.run(product, x.local()), split=split)
        if self.gather_dim is not None:
            x = gather_for_shards(x, self.gather_dim if x.dim() > 2 else 0, self.group)
        elif self.reduces:
            x = copy_to_group(x, self.group)
        y = product(x)
        if self.rows is not None:
            y = torch.cat([y[..., start:stop] for start, stop in self.rows], -1)
        return gather_from_group(y, -1, self.group) if self.gathers else y


@dataclass(frozen=True, eq=False)
class ByInput(OfOneRank):
    """How a module runs whose input features are split.

    Attributes:
        sharding: the same of a linear layer.
        adds: whether the module gives something else than zeros for zeros.
    """

    sharding: RowSharding
    adds: bool

    @property
    def group(self) -> dist.ProcessGroup:
        """The tensor group."""
        return self.sharding.group

    def run(self, product: Product, x: Tensor) -> Tensor:
        """x: [.., in / group], or [.., in] where it arrives whole -> [.., out]."""
        if isinstance(x, WholeTensor) and x.is_by_rows:
            split = None if self.sharding.scatter_dim is None else x.spread.in_blocks(self.group)
            return x.like(self.run(product, x.local()), split=split)
        x = self.sharding.begin(x)
        y = product(x)
        if self.adds and self.group.rank() > 0:
            y = y - product(x.new_zeros((1,) * (x.dim() - 1) + x.shape[-1:]))
        dim = self.sharding.scatter_dim
        if dim is None:
            return reduce_from_group(y, self.group)
        return scatter_partial(y, dim if y.dim() > 2 else 0, self.group)


class DividedModule(nn.Module):
    """Mixin of a module of which this rank has slices."""

    _division: ByOutput | ByInput
    _norms: tuple[SummedNorms, ...]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x: [.., in] -> [.., out], or this rank's features of either."""
        run = _eagerly if torch.compiler.is_compiling() else _run
        with computed_once(self._norms):
            return run(self._division, lambda x: super(DividedModule, self).forward(x, *args, **kwargs), x)


def split_output(
    module: nn.Module,
    cut: Divisible,
    how: ByOutput,
    segments: Sequence[int],
) -> ShardTable:
    """Reduce a module to this rank's features of its output, in place.

    Args:
        module: the module.
        cut: how its tensors are cut.
        how: how it runs.
        segments: sizes of the packed parts of the output, each cut into equal blocks.

    Returns:
        How this rank holds each of its tensors.

    Raises:
        ValueError: a part is not divisible by the size of the group.
    """
    if how.rows is not None:
        return _take(module, cut, how, None, by_input=False)
    features, base, size = list[Range](), 0, how.group.size()
    for segment in segments:
        check_divisible(segment, size, f"the output features (segment of {cut.sizes[1]})")
        start, stop = block_range(segment, size, how.group.rank())
        features.append((base + start, base + stop))
        base += segment
    return _take(module, cut, how, features, by_input=False)


def split_input(module: nn.Module, cut: Divisible, how: ByInput) -> ShardTable:
    """Reduce a module to this rank's features of its input, in place.

    Args:
        module: the module.
        cut: how its tensors are cut.
        how: how it runs.

    Returns:
        How this rank holds each of its tensors.

    Raises:
        ValueError: the features are not divisible by the size of the group.
    """
    check_divisible(cut.sizes[0], how.group.size(), "the input features")
    start, stop = block_range(cut.sizes[0], how.group.size(), how.group.rank())
    if how.sharding.stream is not None:
        how.sharding.stream.features = stop - start
    return _take(module, cut, how, [(start, stop)], by_input=True)


def _take(
    module: nn.Module, cut: Divisible, how: ByOutput | ByInput, features: list[Range] | None, by_input: bool
) -> ShardTable:
    """Slice the tensors, and let the module run as said; ``None``: the tensors stay whole."""
    table: ShardTable = {}
    for name, tensor in tensors_of(module).items():
        dim = None if features is None else cut.dims(by_input).get(name)
        if dim is not None and features is not None:
            ranges = cut.ranges(tensor.shape[dim], features, by_input)
            table[name] = ParameterSharding(ShardSpec.along(tensor.shape, dim, ranges))
        elif isinstance(tensor, nn.Parameter):
            table[name] = ParameterSharding(ShardSpec.whole(tensor.shape), sums_gradient=True)
    apply_specs(module, table)
    if features is not None:
        set_sizes(module, cut, sum(stop - start for start, stop in features), by_input)
    cls: Any = type(module)
    module.__class__ = _divided_class(cls)
    module._division = how  # type: ignore[assignment]
    module._norms = sum_norms(module, how.group) if by_input else ()  # type: ignore[assignment]
    return table


@cache
def _divided_class(cls: Any) -> Any:
    bases = (OtherClass, DividedModule, cls)
    return type(f"Divided{cls.__name__}", bases, {"__module__": cls.__module__, "_twin_of": cls})


def _run(division: ByOutput | ByInput, product: Product, x: Tensor) -> Tensor:
    return division.run(product, x)


_eagerly: Callable[..., Tensor] = torch.compiler.disable(_run)
"""Runs a module outside the graph of a compiled layer."""
