"""Multi-head attention with its heads split over the tensor group.

`torch.nn.MultiheadAttention` holds query, key and value in one parameter and reads its sizes from attributes, so it
cannot be split by replacing linears inside it. This class has its constructor, its parameters and their names, is
it without a mesh, and afterwards runs the local heads between one shared input (backward all-reduce) and one
row-parallel output (forward all-reduce).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.collectives import check_divisible, gather_from_group, reduce_from_group, resolve_group
from lightning_megatron.layers.linear import Mesh
from lightning_megatron.layers.products import (
    PendingProducts,
    autocast_input,
    row_product,
    sharded_product,
    share_input,
)
from lightning_megatron.layers.streams import RankStream
from lightning_megatron.layers.table import ParameterSharding, ShardTable, apply_specs
from lightning_megatron.sharding import Range, ShardSpec, block_range, key_value_heads, packed_ranges


@dataclass(frozen=True, eq=False)
class AttentionSharding:
    """How a sharded attention runs.

    Attributes:
        group: the tensor group.
        heads: this rank's query heads.
        key_value: key/value heads that they read, in order.
        rows: rows of each projection computed here where the parameter itself stays whole, else None.
        sequence_dim: dim along which inputs and output are split (sequence parallelism), or None.
        stream: dropout stream of the local heads.
    """

    group: dist.ProcessGroup
    heads: Range
    key_value: tuple[int, ...]
    rows: tuple[Range, ...] | None
    sequence_dim: int | None
    stream: RankStream

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionSharding:
        return self


class ParallelMultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`, grouped queries too, whose heads are split once `shard_` was called.

    query: [batch, seq, embed_dim] (``batch_first=True``) -> [batch, seq, embed_dim].

    Args:
        embed_dim: size of input and output.
        num_heads: number of query heads; divisible by the tensor group's size.
        num_key_value_heads: number of key/value heads, a divisor of ``num_heads``; ``num_heads`` by default. Fewer
            heads than ranks are kept whole on every rank.

    The other arguments are those of `torch.nn.MultiheadAttention`.
    """

    _sharding: AttentionSharding | None = None
    num_key_value_heads: int

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        num_key_value_heads: int | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.num_key_value_heads = num_key_value_heads or num_heads
        if self.num_key_value_heads != num_heads:
            self._group_queries(bias, device, dtype)

    def _group_queries(self, bias: bool, device: Any, dtype: Any) -> None:
        """Smaller key and value projections: in_proj_weight [embed_dim + 2 * kv_heads * head_dim, embed_dim]."""
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_heads={self.num_heads}` is not a multiple of `num_key_value_heads={self.num_key_value_heads}`."
            )
        if not self._qkv_same_embed_dim or self.bias_k is not None:
            raise ValueError("Grouped queries need `kdim`, `vdim` equal to `embed_dim` and `add_bias_kv=False`.")
        rows = self.embed_dim + 2 * self.num_key_value_heads * self.head_dim
        self.in_proj_weight = nn.Parameter(torch.empty(rows, self.embed_dim, device=device, dtype=dtype))
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            self.in_proj_bias = nn.Parameter(torch.zeros(rows, device=device, dtype=dtype))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `torch.nn.MultiheadAttention.forward`. query: [batch, seq, embed] -> ([batch, seq, embed], weights)."""
        if self._sharding is None and getattr(self, "num_key_value_heads", self.num_heads) == self.num_heads:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        masks = (key_padding_mask, attn_mask, is_causal)
        run = _eager_attention if torch.compiler.is_compiling() else _attention
        return run(self, (query, key, value), masks, need_weights, average_attn_weights)

    def shard_(self, mesh: Mesh, *, sequence_dim: int | None = None, name: str = "attention") -> ShardTable:
        """Keep this rank's heads, in place.

        Args:
            mesh: a mesh with a ``"tensor_parallel"`` axis (or of one dimension), or a process group.
            sequence_dim: dim along which inputs and output are split (sequence parallelism), or None.
            name: distinguishes this layer's dropout stream from those of other layers.

        Returns:
            Sharding of every parameter, keyed by name.

        Raises:
            ValueError: the heads cannot be divided over the group.
        """
        group = resolve_group(mesh)
        size, rank = group.size(), group.rank()
        check_divisible(self.num_heads, size, "`num_heads`")
        total = self._key_value_total()
        read = key_value_heads(self.num_heads, total, size, rank)
        rows = None if total % size == 0 else self._projection_rows(block_range(self.num_heads, size, rank), read)
        table = apply_specs(self, self._table(size, rank, rows))
        out = {"weight": ParameterSharding(_blocks(self.out_proj.weight.shape, 1, size, rank))}
        if self.out_proj.bias is not None:
            whole = ShardSpec.whole(self.out_proj.bias.shape)
            out["bias"] = ParameterSharding(whole, sums_gradient=sequence_dim is not None)
        table |= {f"out_proj.{key}": value for key, value in apply_specs(self.out_proj, out).items()}
        self.register_forward_pre_hook(_no_fused_encoder)
        heads = block_range(self.num_heads, size, rank)
        self._sharding = AttentionSharding(group, heads, read, rows, sequence_dim, RankStream(name, rank))
        return table

    def _key_value_total(self) -> int:
        return getattr(self, "num_key_value_heads", self.num_heads)

    def _projection_rows(self, heads: Range, key_value: Sequence[int]) -> tuple[Range, ...]:
        """Rows of ``in_proj_weight`` for these query heads and these key/value heads."""
        size, total = self.head_dim, self._key_value_total()
        ranges = [(heads[0] * size, heads[1] * size)]
        for base in (self.embed_dim, self.embed_dim + total * size):
            ranges.extend((base + head * size, base + (head + 1) * size) for head in key_value)
        return tuple(ranges)

    def _table(self, size: int, rank: int, rows: tuple[Range, ...] | None) -> ShardTable:
        """Sharding of the parameters that this module itself holds."""
        table: ShardTable = {}
        narrow = self._key_value_total() * self.head_dim
        packed = (self.embed_dim, narrow, narrow)
        for name, parameter in self.named_parameters(recurse=False):
            shape = tuple(parameter.shape)
            if name in ("in_proj_weight", "in_proj_bias"):
                shape = (sum(packed), *shape[1:])
                spec = (
                    ShardSpec.along(shape, 0, packed_ranges(packed, size, rank))
                    if rows is None
                    else ShardSpec.whole(shape)
                )
                table[name] = ParameterSharding(spec, sums_gradient=rows is not None)
            else:
                dim = 2 if name in ("bias_k", "bias_v") else 0
                table[name] = ParameterSharding(_blocks(shape, dim, size, rank))
        return table


def _no_fused_encoder(module: nn.Module, args: Any) -> None:
    """Nothing; a hook keeps torch's encoder layer from its fused kernel, which would take local weights for whole."""


def _blocks(shape: Sequence[int], dim: int, size: int, rank: int) -> ShardSpec:
    return ShardSpec.along(shape, dim, [block_range(shape[dim], size, rank)])


def _attention(
    layer: ParallelMultiheadAttention,
    inputs: tuple[Tensor, Tensor, Tensor],
    masks: tuple[Tensor | None, Tensor | None, bool],
    need_weights: bool,
    average: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of the local heads (all heads without a mesh), from whole inputs to a whole output.

    As in torch, ``is_causal`` without weights or padding takes the place of the mask that it describes.
    """
    sharding = layer._sharding
    unbatched = inputs[0].dim() == 2
    if unbatched:
        first = inputs[0].unsqueeze(0 if layer.batch_first else 1)
        inputs = tuple(first if x is inputs[0] else x.unsqueeze(0 if layer.batch_first else 1) for x in inputs)  # type: ignore[assignment]
        masks = (None if masks[0] is None else masks[0].unsqueeze(0), masks[1], masks[2])
    projected = _project(layer, inputs)
    if not layer.batch_first:
        projected = [x.transpose(0, 1) for x in projected]
    query, key, value = (x.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for x in projected)
    key, value, extra = _extra_positions(layer, key, value)
    causal = masks[2] and masks[0] is None and masks[1] is not None and not need_weights
    mask = None if causal else _merged_mask(layer, masks, query, extra)
    if sharding is not None and layer.training and layer.dropout > 0:
        sharding.stream.open(query.device)
    dropout = layer.dropout if layer.training else 0.0
    out, weights = _attend(query, key, value, mask, causal, dropout, need_weights)
    if sharding is not None:
        sharding.stream.close()
    out = out.transpose(1, 2).flatten(2)
    out = _output(layer, out if layer.batch_first else out.transpose(0, 1))
    if weights is not None:
        weights = _shown_weights(layer, weights, average)
    if unbatched:
        out = out.squeeze(0 if layer.batch_first else 1)
        weights = None if weights is None else weights.squeeze(0)
    return out, weights


def _project(layer: ParallelMultiheadAttention, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Query, key and value of the local heads: [.., heads * head_dim] each; inputs that are one tensor enter once."""
    weights, biases = _projections(layer)
    sharding = layer._sharding
    if sharding is None:
        return [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
    outputs: dict[int, Tensor] = {}
    for source in {id(x): x for x in inputs}.values():
        members = [i for i, x in enumerate(inputs) if x is source]
        pending = PendingProducts(len(members))
        local = [autocast_input(weights[i]) for i in members]
        shared, *passed = share_input(autocast_input(source), local, pending, sharding.group, sharding.sequence_dim)
        for position, i in enumerate(members):
            bias = biases[i]
            bias = None if bias is None else autocast_input(bias)
            outputs[i] = sharded_product(shared, passed[position], bias, pending, position)
    return [outputs[i] for i in range(3)]


def _projections(layer: ParallelMultiheadAttention) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases of the local query, key and value heads."""
    sharding, size = layer._sharding, layer.head_dim
    heads = layer.num_heads if sharding is None else sharding.heads[1] - sharding.heads[0]
    read = layer._key_value_total() if sharding is None else len(sharding.key_value)
    sizes = [heads * size, read * size, read * size]

    def local(packed: Tensor) -> Tensor:
        rows = None if sharding is None else sharding.rows
        return packed if rows is None else torch.cat([packed[start:stop] for start, stop in rows])

    bias = layer.in_proj_bias
    biases: list[Tensor | None] = [None] * 3 if bias is None else list(local(bias).split(sizes))
    if layer._qkv_same_embed_dim:
        return list(local(layer.in_proj_weight).split(sizes)), biases
    return [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight], biases


def _extra_positions(layer: ParallelMultiheadAttention, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
    """``add_bias_kv`` and ``add_zero_attn`` append a position each. key: [batch, heads, seq, head_dim]."""
    extra = 0
    shape = (key.shape[0], key.shape[1], 1, layer.head_dim)
    if layer.bias_k is not None and layer.bias_v is not None:
        key = torch.cat([key, layer.bias_k.view(1, -1, 1, layer.head_dim).expand(shape)], dim=2)
        value = torch.cat([value, layer.bias_v.view(1, -1, 1, layer.head_dim).expand(shape)], dim=2)
        extra += 1
    if layer.add_zero_attn:
        key = torch.cat([key, key.new_zeros(shape)], dim=2)
        value = torch.cat([value, value.new_zeros(shape)], dim=2)
        extra += 1
    return key, value, extra


def _merged_mask(
    layer: ParallelMultiheadAttention,
    masks: tuple[Tensor | None, Tensor | None, bool],
    query: Tensor,
    extra: int,
) -> Tensor | None:
    """Additive mask [batch or 1, local heads or 1, queries, keys], or None."""
    padding, attention, is_causal = masks
    if is_causal and attention is None:
        raise ValueError("`is_causal=True` is a hint about `attn_mask`, as in torch: pass the mask as well.")
    total: Tensor | None = None
    for mask in (attention, padding):
        if mask is None:
            continue
        added = (
            torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, -math.inf)
            if mask.dtype == torch.bool
            else mask
        )
        if mask is padding:
            added = added[:, None, None, :]
        elif added.dim() == 3:
            added = added.view(query.shape[0], -1, *added.shape[1:])
            if layer._sharding is not None:
                added = added[:, slice(*layer._sharding.heads)]
        added = F.pad(added, (0, extra))
        total = added if total is None else total + added
    return total


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """query: [batch, heads, seq, head_dim], key and value with the same or fewer heads -> same as query."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if not need_weights:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal), None
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = F.dropout(weights, dropout) if dropout > 0 else weights
    return weights @ value, weights


def _output(layer: ParallelMultiheadAttention, out: Tensor) -> Tensor:
    sharding, bias = layer._sharding, layer.out_proj.bias
    if sharding is None:
        return F.linear(out, layer.out_proj.weight, bias)
    weight = autocast_input(layer.out_proj.weight)
    total = row_product(autocast_input(out), weight, sharding.group, sharding.sequence_dim)
    return total if bias is None else total + autocast_input(bias)


def _shown_weights(layer: ParallelMultiheadAttention, weights: Tensor, average: bool) -> Tensor:
    """Attention weights as torch returns them: averaged over all heads, or all heads [batch, heads, L, S]."""
    sharding = layer._sharding
    if average:
        mean = weights.sum(1) / layer.num_heads
        return mean if sharding is None else reduce_from_group(mean, sharding.group)
    return weights if sharding is None else gather_from_group(weights, 1, sharding.group)


@torch.compiler.disable
def _eager_attention(*args: Any) -> tuple[Tensor, Tensor | None]:
    return _attention(*args)
