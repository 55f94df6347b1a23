"""Layers that the zoo's networks repeat."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 12
HEADS = 2


class Attention(nn.Module):
    """Causal self-attention; ``[batch, seq, hidden]`` to the same."""

    def __init__(self, hidden: int = HIDDEN, heads: int = HEADS, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.c_proj = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Attends; ``mask`` [batch, seq] marks real keys, ``bias`` [heads, seq, seq] is added to the scores."""
        batch, length, hidden = x.shape
        query, key, value = self.c_attn(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / (hidden // self.heads) ** 0.5
        if bias is not None:
            scores = scores + bias
        allowed = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()[None, None]
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.c_proj((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, hidden))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, hidden: int = HIDDEN, heads: int = HEADS) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attn = Attention(hidden, heads)
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states), mask, bias)
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class TupleBlock(Block):
    """Returns the hidden state first and something nobody needs second."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        out = super().forward(x, mask)
        return out, {"norm": out.detach().norm()}


class Bare(nn.Module):
    """A block without norms, whose norm is listed beside it."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Convolution(nn.Module):
    """Residual convolution; ``[batch, channels, height, width]`` to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.relu(self.norm(x)))
