"""The decoder: embedding, a list of layers, a norm and a head, without any code for pipelines.

::

    tokens ─ embed ─┬─ layer 0 ─ layer 1 ─ … ─ norm ─ head ─ logits
    rotary tables ──┴──────┴─────────┘           pre-norm:  x + attention(norm(x));  x + mlp(norm(x))
                                                 parallel:  x + attention(n) + mlp(n),  n = norm(x)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.layers import (
    ColumnParallelLinear,
    Experts,
    LayerNorm,
    MoE,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from lightning_megatron.models.config import DecoderConfig

Tables = tuple[Tensor, Tensor]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def rotary_tables(length: int, size: int, base: float, like: Tensor) -> Tables:
    """Cosine and sine of the rotary angles of every position (arXiv 2104.09864), computed in float32.

    Args:
        length: number of positions.
        size: features per head.
        base: the angle of feature pair i grows by ``base ** (-2 i / size)`` per position.
        like: tensor with the dtype and device of the result.

    Returns:
        Two tensors [length, size]; feature i and i + size/2 form a pair.
    """
    exponents = torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size
    positions = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / base**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Rotate each pair of features by the angle of its position. x: [batch, heads, seq, size] -> same."""
    cosine, sine = tables
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Attention(nn.Module):
    """Causal self-attention over this rank's heads. x: [batch, seq, hidden] -> same."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_size = config.per_head
        self.dropout = config.dropout
        inner, narrow = config.heads * config.per_head, config.kv_heads * config.per_head
        self.q_proj = ColumnParallelLinear(config.hidden, inner, config.bias)
        self.k_proj = ColumnParallelLinear(config.hidden, narrow, config.bias)
        self.v_proj = ColumnParallelLinear(config.hidden, narrow, config.bias)
        self.o_proj = RowParallelLinear(inner, config.hidden, config.bias)

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, seq, heads * size] -> [batch, heads, seq, size]."""
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)

    def forward(self, x: Tensor, tables: Tables | None) -> Tensor:
        """x: [batch, seq, hidden] -> same; with ``tables``, queries and keys are rotated."""
        query, key, value = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if tables is not None:
            query, key = rotate(query, tables), rotate(key, tables)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """One transformer layer. x: [batch, seq, hidden] -> same.

    Args:
        config: the configuration.
        experts: how many, of a mixture in the place of the feed-forward block; 0 for the latter.
    """

    def __init__(self, config: DecoderConfig, experts: int = 0) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = None if config.parallel_block else _norm(config)
        self.mlp = _mixture(config, experts) if experts else _feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, tables: Tables | None = None) -> Tensor:
        """x: [batch, seq, hidden] -> same."""
        normed = self.attention_norm(x)
        attended = self.dropout(self.attention(normed, tables))
        if self.mlp_norm is None:
            return x + attended + self.dropout(self.mlp(normed))
        x = x + attended
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocabulary].

    Args:
        config: the configuration.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = VocabParallelEmbedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden) if config.positions == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList([DecoderLayer(config, experts) for experts in config.experts_of_layers])
        self.norm = _norm(config)
        self.head = ColumnParallelLinear(config.hidden, config.vocabulary, bias=False, gather_output=True)
        if config.tied:
            self.head.weight = self.embed.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        deviation = self.config.initial_deviation
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, Experts):
            for weight in module.parameters():
                nn.init.normal_(weight, std=deviation)
            nn.init.normal_(module.down, std=deviation / math.sqrt(2 * self.config.layers))
        residual = {Attention: "o_proj", ParallelMLP: "down_proj"}.get(type(module))
        if residual is not None:
            weight = module.get_submodule(residual).get_parameter("weight")
            nn.init.normal_(weight, std=deviation / math.sqrt(2 * self.config.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch, seq] -> logits [batch, seq, vocabulary].

        Raises:
            ValueError: the sequence is longer than the learned positions.
        """
        length, config = tokens.shape[1], self.config
        x, tables = self.embed(tokens), None
        if self.positions is None:
            tables = rotary_tables(length, config.per_head, config.rotary_base, x)
        elif length > config.sequence:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the {config.sequence} learned positions; raise "
                "`DecoderConfig.sequence`."
            )
        else:
            x = x + self.positions(torch.arange(length, device=tokens.device))
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, tables)
        return self.head(self.norm(x))


def _feed_forward(config: DecoderConfig) -> nn.Module:
    return ParallelMLP(config.hidden, config.inner, _ACTIVATIONS[config.activation], config.gated, bias=config.bias)


def _mixture(config: DecoderConfig, experts: int) -> nn.Module:
    return MoE(
        config.hidden,
        config.inner_of_expert,
        experts,
        config.top_k,
        gated=config.gated,
        shared=config.inner if config.residual_expert else 0,
        router=config.router,
        capacity_factor=config.capacity_factor,
        biased=config.router_bias,
    )


def _norm(config: DecoderConfig) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(config.hidden, eps=config.norm_epsilon)
    return LayerNorm(config.hidden, eps=config.norm_epsilon)
