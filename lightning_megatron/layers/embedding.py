"""Token embedding split over the vocabulary.

Every rank looks up the tokens of its slice of the vocabulary and contributes zeros for the others; one all-reduce sums
the contributions. The vocabulary is padded internally to a multiple of 128 per rank; the padding is never visible.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.layers.bounds import check_bounds
from lightning_megatron.layers.loss import local_vocabulary
from lightning_megatron.layers.table import ParameterSharding, ShardTable, apply_specs
from lightning_megatron.mesh.messages.collectives import reduce_from_group, resolve_group
from lightning_megatron.mesh.parts.boxes import ShardSpec, block_range, padded_vocabulary
from lightning_megatron.mesh.pickling import OfOneRank


@dataclass(frozen=True, eq=False)
class EmbeddingSharding(OfOneRank):
    """This rank's part of the vocabulary: entries [start, start + held)."""

    group: dist.ProcessGroup
    start: int
    held: int


class VocabParallelEmbedding(nn.Embedding):
    """`torch.nn.Embedding` whose entries are split over the tensor group once `shard_` has been called.

    tokens: [..] -> [.., embedding_dim], whole on every rank. The constructor is the same. `shard_` refuses ``max_norm``
    and ``sparse``, because they need the whole table.
    """

    _sharding: EmbeddingSharding | None = None

    def forward(self, input: Tensor) -> Tensor:
        """input: [..] of token ids -> [.., embedding_dim]."""
        sharding = self._sharding
        if sharding is None:
            return super().forward(input)
        look_up = _eager_lookup if torch.compiler.is_compiling() else _lookup
        return look_up(self, sharding, input)

    def shard_(self, mesh: DeviceMesh | dist.ProcessGroup) -> ShardTable:
        """Reduce the weight to this rank's entries, in place.

        Args:
            mesh: a mesh with a ``"tensor_parallel"`` axis (or of one dimension), or a process group.

        Returns:
            Sharding of ``weight``.

        Raises:
            ValueError: ``max_norm`` or ``sparse`` is set.
        """
        if self.max_norm is not None or self.sparse:
            raise ValueError(
                f"`max_norm={self.max_norm}`, `sparse={self.sparse}` need the whole embedding table on every rank; "
                "leave this embedding out of the plan (style 'replicate')."
            )
        group = resolve_group(mesh)
        vocabulary = self.num_embeddings
        padded = padded_vocabulary(vocabulary, group.size()) if group.size() > 1 else vocabulary
        entries = block_range(padded, group.size(), group.rank())
        spec = ShardSpec.along((vocabulary, self.embedding_dim), 0, [entries])
        table = apply_specs(self, {"weight": ParameterSharding(spec)})
        self._sharding = EmbeddingSharding(group, *local_vocabulary(vocabulary, group))
        return table


def _lookup(layer: VocabParallelEmbedding, sharding: EmbeddingSharding, tokens: Tensor) -> Tensor:
    check_bounds(tokens, layer.num_embeddings, "Token id")
    index = tokens - sharding.start
    here = (index >= 0) & (index < sharding.held)
    if layer.scale_grad_by_freq:  # tokens of other ranks must not count as uses of an entry
        found = F.embedding(index[here], layer.weight, scale_grad_by_freq=True)
        rows = found.new_zeros((*tokens.shape, layer.embedding_dim)).masked_scatter(here.unsqueeze(-1), found)
    else:
        rows = F.embedding(index.where(here, 0), layer.weight)
    if layer.padding_idx is not None:  # its entry is looked up, but gets no gradient
        rows = rows.where((tokens != layer.padding_idx).unsqueeze(-1), rows.detach())
    rows = rows * here.unsqueeze(-1).to(rows.dtype)
    return reduce_from_group(rows, sharding.group)


_eager_lookup = torch.compiler.disable(_lookup)
