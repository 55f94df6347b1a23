"""Experts to build mixtures from: stacked in one module, and one by itself."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Experts(nn.Module):
    """Feed-forward networks stacked in one module: ``down(silu(gate(x)) · up(x))``, or ``down(gelu(up(x)))``.

    Args:
        hidden: width of tokens.
        intermediate: width inside an expert.
        experts: how many.
        gated: whether they have a gate.

    Attributes:
        num_experts: how many are here.
        up: [experts, hidden, intermediate].
        gate: the same, or ``None``.
        down: [experts, intermediate, hidden].
    """

    def __init__(self, hidden: int, intermediate: int, experts: int, *, gated: bool = True) -> None:
        super().__init__()
        if experts < 2:
            raise ValueError(f"`experts={experts}` must be at least 2; one expert is an MLP.")
        self.num_experts = experts
        self.up = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.gate = nn.Parameter(torch.empty(experts, hidden, intermediate)) if gated else None
        self.down = nn.Parameter(torch.empty(experts, intermediate, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's matrices as ``nn.Linear`` draws its weight."""
        for weight in (self.up, self.gate, self.down):
            if weight is not None:
                nn.init.uniform_(weight, -1 / math.sqrt(weight.shape[1]), 1 / math.sqrt(weight.shape[1]))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of what a token's experts make of it.

        Args:
            hidden: [tokens, hidden].
            index: [tokens, k] numbers of experts.
            weights: [tokens, k].

        Returns:
            [tokens, hidden].
        """
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = torch.where(index == expert)
            if len(token):
                made = self._one(hidden[token], expert) * weights[token, place, None]
                out = out.index_add(0, token, made.to(out.dtype))
        return out

    def _one(self, rows: Tensor, expert: int) -> Tensor:
        up = rows @ self.up[expert]
        inner = F.gelu(up) if self.gate is None else F.silu(rows @ self.gate[expert]) * up
        return inner @ self.down[expert]


class _Gated(nn.Module):
    """``down(silu(gate(x)) · up(x))``."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def feed_forward(hidden: int, intermediate: int, gated: bool) -> nn.Module:
    """One expert by itself: ``[..., hidden] → [..., hidden]``."""
    if gated:
        return _Gated(hidden, intermediate)
    up, down = nn.Linear(hidden, intermediate, bias=False), nn.Linear(intermediate, hidden, bias=False)
    return nn.Sequential(up, nn.GELU(), down)
