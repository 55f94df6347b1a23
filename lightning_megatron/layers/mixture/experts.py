"""Experts to build mixtures from: stacked in one module, and one by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.layers.mixture.beside import Beside


class Experts(nn.Module):
    """Feed-forward networks stacked in one module: ``down(silu(gate(x)) · up(x))``, or ``down(gelu(up(x)))``.

    Args:
        hidden: width of tokens.
        intermediate: width inside an expert.
        experts: how many.
        gated: whether they have a gate.

    Attributes:
        num_experts: how many are here.
        beside: what else runs in the call that is under way.
        up: [experts, hidden, intermediate].
        gate: the same, or ``None``.
        down: [experts, intermediate, hidden].
    """

    def __init__(self, hidden: int, intermediate: int, experts: int, *, gated: bool = True) -> None:
        super().__init__()
        if experts < 2:
            raise ValueError(f"`experts={experts}` must be at least 2; one expert is an MLP.")
        self.num_experts = experts
        self.beside: Beside | None = None
        self.up = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.gate = nn.Parameter(torch.empty(experts, hidden, intermediate)) if gated else None
        self.down = nn.Parameter(torch.empty(experts, intermediate, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's matrices as ``nn.Linear`` draws its weight."""
        for weight in (self.up, self.gate, self.down):
            if weight is not None:
                nn.init.uniform_(weight, -1 / math.sqrt(weight.shape[1]), 1 / math.sqrt(weight.shape[1]))

    @contextmanager
    def running(self, beside: Beside) -> Iterator[None]:
        """Around a call, while whose tokens are sent to other ranks ``beside`` may run."""
        self.beside = beside
        try:
            yield
        finally:
            self.beside = None

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of what a token's experts make of it.

        Args:
            hidden: [tokens, hidden].
            index: [tokens, k] numbers of experts.
            weights: [tokens, k].

        Returns:
            [tokens, hidden].
        """
        matrices = [weight for weight in (self.up, self.gate, self.down) if weight is not None]
        dtype = _product_dtype(hidden)
        if has_grouped_products(dtype, hidden.device, matrices):
            return self._grouped(hidden, index, weights, dtype)
        out, split = torch.zeros_like(hidden), [weight.unbind() for weight in matrices]
        for expert in range(self.num_experts):
            token, place = torch.where(index == expert)
            if len(token):
                made = _one(hidden[token], [each[expert] for each in split]) * weights[token, place, None]
                out = out.index_add(0, token, made.to(out.dtype))
        return out

    def _grouped(self, hidden: Tensor, index: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """The same by products of all experts at once, without asking the device how many tokens each has."""
        meant = index < self.num_experts  # others are meant for none
        expert, order = torch.sort(index.clamp(max=self.num_experts - 1).flatten(), stable=True)
        ends = torch.searchsorted(expert, torch.arange(self.num_experts, device=expert.device), right=True)
        rows = hidden[order // index.shape[1]].to(dtype)

        def product(x: Tensor, weight: Tensor) -> Tensor:
            return F.grouped_mm(x, weight.to(dtype), offs=ends.to(torch.int32))

        up = product(rows, self.up)
        inner = F.gelu(up) if self.gate is None else F.silu(product(rows, self.gate)) * up
        made = product(inner, self.down)
        back = torch.empty_like(made).index_copy(0, order, made).view(*index.shape, -1)
        return (back * (weights * meant)[..., None]).sum(1).to(hidden.dtype)


def _one(rows: Tensor, matrices: list[Tensor]) -> Tensor:
    """Output of one expert for rows."""
    up, *gate, down = matrices
    inner = F.silu(rows @ gate[0]) * (rows @ up) if gate else F.gelu(rows @ up)
    return inner @ down


def _product_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def has_grouped_products(dtype: torch.dtype, device: torch.device, matrices: list[nn.Parameter]) -> bool:
    """Whether torch multiplies rows of several experts at once: not in float64, and only rows of whole 16 bytes.

    On GPUs in bfloat16 and from compute capability 9.0 on.
    """
    if device.type == "cuda":
        known = dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)
    else:
        known = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    fits = all(size * dtype.itemsize % 16 == 0 for weight in matrices for size in weight.shape[1:])
    return known and fits and hasattr(F, "grouped_mm")


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
