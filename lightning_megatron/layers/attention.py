"""Multi-head attention with its heads split over the tensor group.

`torch.nn.MultiheadAttention` holds query, key and value in one parameter and reads its sizes from attributes, so it
cannot be split by replacing linears inside it. This class has the same constructor and parameter names, and computes
the same until `shard_` is called. After that, it runs the local heads between one shared input (all-reduce in the
backward) and one row-parallel output (all-reduce in the forward).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.layers.attend import AttentionSharding, PutOffProjection, attend_heads, key_value_total
from lightning_megatron.layers.linear import Mesh
from lightning_megatron.layers.streams import RankStream
from lightning_megatron.layers.table import ParameterSharding, ShardTable, apply_specs
from lightning_megatron.mesh.messages.collectives import check_divisible, resolve_group
from lightning_megatron.mesh.parts.boxes import Range, ShardSpec, block_range, key_value_heads, packed_ranges


class ParallelMultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`, with grouped queries too, whose heads are split once `shard_` has been called.

    query: [batch, seq, embed_dim] (``batch_first=True``) -> [batch, seq, embed_dim].

    Args:
        embed_dim: size of input and output.
        num_heads: number of query heads; divisible by the size of the tensor group.
        num_key_value_heads: number of key/value heads, a divisor of ``num_heads``; ``num_heads`` by default. If it is
            not divisible by the size of the tensor group, every rank keeps all key/value projections.

    The other arguments are those of `torch.nn.MultiheadAttention`.

    Raises:
        ValueError: ``num_heads`` is not a multiple of ``num_key_value_heads``, or grouped queries are combined with
            ``kdim``, ``vdim`` or ``add_bias_kv``.
    """

    _sharding: AttentionSharding | None = None
    put_off: PutOffProjection | None = None
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
        """Shrink the key and value projections: in_proj_weight [embed_dim + 2 * kv_heads * head_dim, embed_dim]."""
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
        if self._sharding is None and self.put_off is None and key_value_total(self) == self.num_heads:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        masks = (key_padding_mask, attn_mask, is_causal)
        run = _eager_attention if torch.compiler.is_compiling() else attend_heads
        return run(self, (query, key, value), masks, need_weights, average_attn_weights)

    def shard_(self, mesh: Mesh, *, sequence_dim: int | None = None, name: str = "attention") -> ShardTable:
        """Reduce the parameters to this rank's heads, in place.

        Args:
            mesh: a mesh with a ``"tensor_parallel"`` axis (or of one dimension), or a process group.
            sequence_dim: dim along which inputs and output are split (sequence parallelism), or None.
            name: distinguishes this layer's dropout stream from those of other layers.

        Returns:
            Sharding of every parameter, keyed by name.

        Raises:
            ValueError: ``num_heads`` is not divisible by the size of the group.
        """
        group = resolve_group(mesh)
        size, rank = group.size(), group.rank()
        check_divisible(self.num_heads, size, "`num_heads`")
        total = key_value_total(self)
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
        self._sharding = AttentionSharding(
            group, heads, read, rows, sequence_dim, RankStream(name, rank, group.size(), heads=True)
        )
        return table

    def _projection_rows(self, heads: Range, key_value: Sequence[int]) -> tuple[Range, ...]:
        """Rows of ``in_proj_weight`` for these query heads and these key/value heads."""
        size, total = self.head_dim, key_value_total(self)
        ranges = [(heads[0] * size, heads[1] * size)]
        for base in (self.embed_dim, self.embed_dim + total * size):
            ranges.extend((base + head * size, base + (head + 1) * size) for head in key_value)
        return tuple(ranges)

    def _table(self, size: int, rank: int, rows: tuple[Range, ...] | None) -> ShardTable:
        """Sharding of the parameters that belong to this module itself, not to ``out_proj``."""
        table: ShardTable = {}
        narrow = key_value_total(self) * self.head_dim
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
    """Do nothing. Any hook keeps torch's encoder layer from its fused kernel, which needs the whole weights."""


def _blocks(shape: Sequence[int], dim: int, size: int, rank: int) -> ShardSpec:
    return ShardSpec.along(shape, dim, [block_range(shape[dim], size, rank)])


_eager_attention: Callable[..., tuple[Tensor, Tensor | None]] = torch.compiler.disable(attend_heads)
