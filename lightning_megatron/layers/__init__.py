"""Drop-in replacements for torch layers that can be split over the tensor ranks."""

from lightning_megatron.layers.attention import ParallelMultiheadAttention
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.logits import VocabParallelLogits
from lightning_megatron.layers.loss import vocab_parallel_cross_entropy
from lightning_megatron.layers.mixture.experts import Experts
from lightning_megatron.layers.mixture.moe import MoE, router_losses
from lightning_megatron.layers.mlp import ParallelMLP
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.table import ParameterSharding, ShardTable

__all__ = [
    "ColumnParallelLinear",
    "Experts",
    "LayerNorm",
    "MoE",
    "ParallelMLP",
    "ParallelMultiheadAttention",
    "ParameterSharding",
    "RMSNorm",
    "RowParallelLinear",
    "ShardTable",
    "VocabParallelEmbedding",
    "VocabParallelLogits",
    "router_losses",
    "vocab_parallel_cross_entropy",
]
