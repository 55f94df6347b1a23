"""Linear layers split by output (column) or by input (row) over the tensor group.

For Y = f(X A) B, A is split by columns and B by rows. Every rank then computes its columns of f(X A) and its term of
the sum over the inner dim, so a pair needs one all-reduce in the forward and one in the backward (Shoeybi et al., arXiv
1909.08053). The names follow the mathematics: torch stores the weight of a linear as [out, in], so a column-parallel
layer holds rows of ``weight``.

Before `shard_` is called, both compute what `torch.nn.Linear` computes, bit for bit; `shard_` reduces them to this
rank's part in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.layers.all_here import all_tokens_here
from lightning_megatron.layers.logits import VocabParallelLogits
from lightning_megatron.layers.multiply.products import SIXTEEN_BIT, Products, PutOff, add_bias, row_product
from lightning_megatron.layers.multiply.weight_view import autocast_input
from lightning_megatron.layers.shared_input import ColumnEntry, may_put_off, operand_of
from lightning_megatron.layers.streams import RankStream
from lightning_megatron.layers.table import ParameterSharding, ShardTable, apply_specs
from lightning_megatron.layers.whole import WholeTensor
from lightning_megatron.mesh.messages.collectives import (
    check_divisible,
    gather_from_group,
    resolve_group,
    split_to_group,
)
from lightning_megatron.mesh.parts.boxes import Range, ShardSpec, block_range, padded_vocabulary
from lightning_megatron.mesh.pickling import OfOneRank

Mesh = DeviceMesh | dist.ProcessGroup


@dataclass(frozen=True, eq=False)
class ColumnSharding(OfOneRank):
    """How a split column-parallel layer runs.

    Attributes:
        entry: the input that it shares with the other layers that read the same tensor.
        rows: ranges of output features to compute where the parameter itself stays whole (replicated heads), else None.
        output: ``"split"``; ``"gather"`` for code that reads the whole output; ``"logits"`` for a vocabulary.
        vocabulary: number of output features without padding, for ``"logits"``.
    """

    entry: ColumnEntry
    rows: tuple[Range, ...] | None = None
    output: str = "split"
    vocabulary: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ColumnSharding:
        return replace(self, entry=copy.deepcopy(self.entry, memo))


@dataclass(frozen=True, eq=False)
class RowSharding(OfOneRank):
    """How a split row-parallel layer runs.

    Attributes:
        group: the tensor group.
        split_input: whether the input arrives whole and must be split by this layer.
        token_dim: dim along which the output is split (sequence parallelism), or None for a whole output.
        stream: dropout stream of the region, which this layer closes.
        entries: shared inputs of the region, whose references this layer drops.
    """

    group: dist.ProcessGroup
    split_input: bool = False
    token_dim: int | None = None
    stream: RankStream | None = None
    entries: list[ColumnEntry] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowSharding:
        stream, entries = copy.deepcopy(self.stream, memo), copy.deepcopy(self.entries, memo)
        return replace(self, stream=stream, entries=entries)

    @property
    def scatter_dim(self) -> int | None:
        """Dim along which the output is split, or None when every rank has all of it."""
        return None if all_tokens_here() else self.token_dim

    def begin(self, x: Tensor) -> Tensor:
        """End the region before the layer. x: [.., in], or [.., in / group] -> [.., in / group]."""
        if self.stream is not None:
            self.stream.close()
        for entry in self.entries:
            entry.forget()
        return split_to_group(x, -1, self.group) if self.split_input else x


class ColumnParallelLinear(nn.Linear):
    """`torch.nn.Linear` whose output features are split over the tensor group once `shard_` has been called.

    x: [.., in] -> [.., out / group] (``gather_output=False``) or [.., out].

    Args:
        in_features: size of each input.
        out_features: logical size of each output.
        bias: whether there is a bias.
        gather_output: whether every rank gathers the whole output.
    """

    gather_output = False
    transposed = False
    put_off: PutOff | None = None
    products: Products = SIXTEEN_BIT
    _sharding: ColumnSharding | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        gather_output: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.gather_output = gather_output

    def forward(self, input: Tensor) -> Tensor:
        """input: [.., in] -> [.., out / group], or [.., out] where the output is gathered or the layer is not split."""
        sharding = self._sharding
        if sharding is None:
            return super().forward(input)
        if torch.compiler.is_compiling():
            return _eager_column(self, sharding, input)
        return _column_forward(self, sharding, input)

    def local_weight(self) -> Tensor:
        """Weight of this rank's output features: [out / group, in], in autocast's dtype where autocast is on."""
        return operand_of(self).of(self.weight)

    def shard_(
        self,
        mesh: Mesh,
        *,
        entry: ColumnEntry | None = None,
        segments: Sequence[int] | None = None,
        rows: Sequence[Range] | None = None,
        output: str | None = None,
    ) -> ShardTable:
        """Reduce the parameters to this rank's slices, in place.

        Args:
            mesh: a mesh with a ``"tensor_parallel"`` axis (or of one dimension), or a process group.
            entry: input shared with the other layers that read the same tensor; a new one by default.
            segments: sizes of the packed parts of the output, each split separately; one part by default.
            rows: ranges of output features that this rank computes while the parameter stays whole; the ranges of
                ranks may overlap, and the gradient must be summed over the group.
            output: ``"split"``, ``"gather"`` or ``"logits"``; from ``gather_output`` by default.

        Returns:
            Sharding of ``weight`` and ``bias``.

        Raises:
            ValueError: a segment is not divisible by the size of the group.
        """
        group = resolve_group(mesh)
        entry = entry or ColumnEntry(group)
        output = output or ("gather" if self.gather_output else "split")
        kept = None if rows is None else tuple(rows)
        ranges = [(0, self.out_features)] if kept else self._ranges(group, segments, output)
        table = self._table(ranges, sums_gradient=kept is not None)
        apply_specs(self, table)
        entry.members.append(self)
        self._sharding = ColumnSharding(entry, kept, output, self.out_features if output == "logits" else 0)
        return table

    def _ranges(self, group: dist.ProcessGroup, segments: Sequence[int] | None, output: str) -> list[Range]:
        size, rank = group.size(), group.rank()
        if output == "logits":
            return [
                block_range(padded_vocabulary(self.out_features, size) if size > 1 else self.out_features, size, rank)
            ]
        ranges, base = [], 0
        for segment in segments or (self.out_features,):
            check_divisible(segment, size, f"`out_features` (segment of {self.out_features})")
            start, stop = block_range(segment, size, rank)
            ranges.append((base + start, base + stop))
            base += segment
        return ranges

    def _table(self, ranges: Sequence[Range], sums_gradient: bool) -> ShardTable:
        shape = (self.in_features, self.out_features) if self.transposed else (self.out_features, self.in_features)
        table = {"weight": ParameterSharding(ShardSpec.along(shape, int(self.transposed), ranges), sums_gradient)}
        if self.bias is not None:
            table["bias"] = ParameterSharding(ShardSpec.along((self.out_features,), 0, ranges), sums_gradient)
        return table


class RowParallelLinear(nn.Linear):
    """`torch.nn.Linear` whose input features are split over the tensor group once `shard_` has been called.

    x: [.., in / group] (``input_is_parallel=True``) or [.., in] -> [.., out].

    Args:
        in_features: logical size of each input.
        out_features: size of each output.
        bias: whether there is a bias; it is added once, after the sum over the group.
        input_is_parallel: whether the input arrives split, from a column-parallel layer.
    """

    input_is_parallel = True
    transposed = False
    put_off: PutOff | None = None
    products: Products = SIXTEEN_BIT
    _sharding: RowSharding | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        input_is_parallel: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.input_is_parallel = input_is_parallel

    def forward(self, input: Tensor) -> Tensor:
        """input: [.., in / group] -> [.., out]; under sequence parallelism the output is split along the sequence."""
        sharding = self._sharding
        if sharding is None:
            return super().forward(input)
        if torch.compiler.is_compiling():
            return _eager_row(self, sharding, input)
        return _row_forward(self, sharding, input)

    def shard_(
        self,
        mesh: Mesh,
        *,
        segments: Sequence[int] | None = None,
        split_input: bool | None = None,
        scatter_dim: int | None = None,
        stream: RankStream | None = None,
        entries: Sequence[ColumnEntry] = (),
    ) -> ShardTable:
        """Reduce the weight to this rank's slice, in place; the bias stays whole.

        Args:
            mesh: a mesh with a ``"tensor_parallel"`` axis (or of one dimension), or a process group.
            segments: sizes of the packed parts of the input, as the preceding column-parallel layer splits them.
            split_input: whether the input arrives whole; the negation of ``input_is_parallel`` by default.
            scatter_dim: dim along which the output is split (sequence parallelism), or None.
            stream: dropout stream of the region, which this layer closes.
            entries: shared inputs of the region, whose references this layer drops.

        Returns:
            Sharding of ``weight`` and ``bias``.

        Raises:
            ValueError: a segment is not divisible by the size of the group.
        """
        group = resolve_group(mesh)
        split_input = not self.input_is_parallel if split_input is None else split_input
        ranges, base = [], 0
        for segment in segments or (self.in_features,):
            check_divisible(segment, group.size(), f"`in_features` (segment of {self.in_features})")
            start, stop = block_range(segment, group.size(), group.rank())
            ranges.append((base + start, base + stop))
            base += segment
        shape = (self.in_features, self.out_features) if self.transposed else (self.out_features, self.in_features)
        table = {"weight": ParameterSharding(ShardSpec.along(shape, 0 if self.transposed else 1, ranges))}
        if self.bias is not None:
            table["bias"] = ParameterSharding(ShardSpec.whole((self.out_features,)), scatter_dim is not None)
        apply_specs(self, table)
        if stream is not None and len(ranges) == 1:
            stream.features = ranges[0][1] - ranges[0][0]
        self._sharding = RowSharding(group, split_input, scatter_dim, stream, list(entries))
        return table


def _column_forward(layer: ColumnParallelLinear, sharding: ColumnSharding, x: Tensor) -> Tensor:
    rows = isinstance(x, WholeTensor) and x.is_by_rows  # whose tokens are split: each is multiplied where it is
    local = sharding.entry.product(layer, x.local() if rows else x)  # type: ignore[attr-defined]
    if sharding.output == "gather" or (rows and sharding.output == "logits"):
        local = gather_from_group(local, -1, sharding.entry.group)
        local = local.narrow(-1, 0, sharding.vocabulary) if sharding.output == "logits" else local
    if rows:
        split = None if sharding.entry.gather_dim is None else x.spread.together()  # type: ignore[attr-defined]
        return x.like(local, split=split)  # type: ignore[attr-defined, no-any-return]
    if sharding.output == "logits":
        return VocabParallelLogits.wrap(local, sharding.entry.group, sharding.vocabulary)
    return local


def _row_forward(layer: RowParallelLinear, sharding: RowSharding, x: Tensor) -> Tensor:
    if isinstance(x, WholeTensor) and x.is_by_rows:
        split = None if sharding.scatter_dim is None else x.spread.in_blocks(sharding.group)
        return x.like(_row_forward(layer, sharding, x.local()), split=split)
    x = sharding.begin(x)
    dim = sharding.scatter_dim if sharding.scatter_dim is None or x.dim() > 2 else 0
    put_off = layer.put_off if may_put_off(layer, x) else None
    weight, operand = layer.weight if put_off is None else layer.weight.detach(), operand_of(layer)
    out = row_product(autocast_input(x), weight, sharding.group, dim, put_off, layer.products, operand)
    return add_bias(out, layer.bias)


_eager_column: Callable[..., Tensor] = torch.compiler.disable(_column_forward)
_eager_row: Callable[..., Tensor] = torch.compiler.disable(_row_forward)
