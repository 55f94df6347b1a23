"""The feed-forward block, plain or gated: the smallest column/row pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.layers.linear import ColumnParallelLinear, Mesh, RowParallelLinear
from lightning_megatron.layers.shared_input import ColumnEntry
from lightning_megatron.layers.streams import RankStream
from lightning_megatron.layers.table import ShardTable
from lightning_megatron.mesh.messages.collectives import resolve_group


class ParallelMLP(nn.Module):
    """``down(activation(up(x)))``, or ``down(activation(gate(x)) * up(x))`` when gated; `shard_` splits inner features.

    x: [.., hidden] -> [.., hidden].

    Args:
        hidden_size: size of the input and the output.
        intermediate_size: inner size, divisible by the tensor group's size.
        activation: applied to the inner features.
        gated: whether a second projection gates the first (GLU; Shazeer, arXiv 2002.05202).
        bias: whether the linears have a bias.
        dropout: probability of dropping an inner feature.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, device, dtype)
        self.gate_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, device, dtype) if gated else None
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, device, dtype)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: [.., hidden] -> [.., hidden]."""
        inner = self.up_proj(x)
        inner = self.activation(inner) if self.gate_proj is None else self.activation(self.gate_proj(x)) * inner
        output: Tensor = self.down_proj(self.dropout(inner))
        return output

    def shard_(self, mesh: Mesh, *, sequence_dim: int | None = None, name: str = "mlp") -> ShardTable:
        """Reduce the parameters to this rank's inner features, in place.

        Args:
            mesh: a mesh with a ``"tensor_parallel"`` axis (or of one dimension), or a process group.
            sequence_dim: dim along which input and output are split (sequence parallelism), or None.
            name: distinguishes this layer's dropout stream from those of other layers.

        Returns:
            Sharding of every parameter, keyed by name.

        Raises:
            ValueError: ``intermediate_size`` is not divisible by the size of the group.
        """
        group = resolve_group(mesh)
        stream = RankStream(name, group.rank(), group.size())
        entry = ColumnEntry(group, sequence_dim, stream)
        parts = {"up_proj": self.up_proj.shard_(group, entry=entry)}
        if self.gate_proj is not None:
            parts["gate_proj"] = self.gate_proj.shard_(group, entry=entry)
        parts["down_proj"] = self.down_proj.shard_(group, scatter_dim=sequence_dim, stream=stream, entries=[entry])
        return {f"{part}.{key}": value for part, table in parts.items() for key, value in table.items()}
