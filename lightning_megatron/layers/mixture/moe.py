"""A mixture of experts to build models from; a plain module, whose experts any ``expert_parallel_size`` shares out.

Every token goes to the ``top_k`` experts that its router likes best (Shazeer et al., arXiv 1701.06538), and to the
shared expert, if there is one (DeepSeekMoE, arXiv 2401.06066). No token is dropped.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROUTERS = ("softmax", "sigmoid")


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


class MoE(nn.Module):
    """A mixture of experts in the place of an MLP: ``[..., hidden] → [..., hidden]``.

    Args:
        hidden: width of tokens.
        intermediate: width inside an expert.
        experts: how many there are.
        top_k: how many a token goes to.
        gated: whether experts have a gate (SwiGLU).
        shared: width of an expert that all tokens go to; 0 for none. With the width of a dense MLP and ``top_k=1`` this
            is a residual mixture (DeepSpeed-MoE, arXiv 2201.05596).
        router: ``"softmax"`` weighs by probabilities, ``"sigmoid"`` by scores of each expert by itself, as DeepSeek-V3.
        normalize: whether a token's weights add up to ``scale``; by default if it goes to several experts, as the
            weight of one would be constant.
        scale: factor of the weights.

    Attributes:
        router_logits: [tokens, experts] of the latest forward, for :func:`router_losses`; ``None`` before.

    Raises:
        ValueError: sizes that do not fit together, or an unknown router.

    Example:
        ``MoE(1024, 704, experts=64, top_k=6, shared=1408)``: 64 experts of width 704, of which a token takes 6, beside
        one of width 1408 for all.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int = 2,
        *,
        gated: bool = True,
        shared: int = 0,
        router: str = "softmax",
        normalize: bool | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"`top_k={top_k}` must lie between 1 and `experts={experts}`.")
        if router not in ROUTERS:
            raise ValueError(f"`router={router!r}` must be one of {', '.join(map(repr, ROUTERS))}.")
        self.top_k, self.kind, self.scale = top_k, router, scale
        self.normalize = top_k > 1 if normalize is None else normalize
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(hidden, intermediate, experts, gated=gated)
        self.shared = _feed_forward(hidden, shared, gated) if shared else None
        self.router_logits: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``x: [..., hidden]`` → the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        logits = self.router(rows)
        self.router_logits = logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if self.kind == "softmax" else logits.sigmoid()
        weights, index = scores.topk(self.top_k)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out: Tensor = self.experts(rows, index, (weights * self.scale).to(rows.dtype))
        if self.shared is not None:
            out = out + self.shared(rows)
        return out.view(x.shape)

    def __getstate__(self) -> dict[str, Any]:
        """Without the logits of the latest forward, whose graph cannot be copied."""
        return {**self.__dict__, "router_logits": None}


class _Gated(nn.Module):
    """``down(silu(gate(x)) · up(x))``."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def _feed_forward(hidden: int, intermediate: int, gated: bool) -> nn.Module:
    if gated:
        return _Gated(hidden, intermediate)
    up, down = nn.Linear(hidden, intermediate, bias=False), nn.Linear(intermediate, hidden, bias=False)
    return nn.Sequential(up, nn.GELU(), down)


def load_balancing_loss_func(gate_logits: tuple[Tensor, ...], num_experts: int, top_k: int) -> Tensor:
    """``E · Σ_i f_i P_i``, the mean over layers: f_i the share of choices of expert i, P_i its mean probability
    (Switch Transformer, arXiv 2101.03961, eq. 4-6). 1 where all experts are equally liked.

    Over replicas :class:`~lightning_megatron.MegatronStrategy` gives it the logits of all of them.

    Args:
        gate_logits: per layer [tokens, experts].
        num_experts: E.
        top_k: experts of a token; f_i adds up to it.
    """
    losses = []
    for logits in gate_logits:
        shares = logits.softmax(-1)
        chosen = F.one_hot(logits.topk(top_k).indices, num_experts).sum(1).to(shares.dtype)
        losses.append(num_experts * (chosen.mean(0) * shares.mean(0)).sum())
    return torch.stack(losses).mean()


def router_losses(module: nn.Module, *, balance: float = 0.0, z: float = 0.0) -> Tensor:
    """What the mixtures in ``module`` add to the loss of the step that has just called them.

    Args:
        module: with one :class:`MoE` or more.
        balance: factor of :func:`load_balancing_loss_func`, of all tokens of the batch; the mean over mixtures.
        z: factor of the mean square of the logits' logarithmic sum (ST-MoE, arXiv 2202.08906, eq. 5).

    Raises:
        ValueError: there is no mixture, or one that has not been called.

    Example:
        ``loss = cross_entropy(self.net(x), y) + router_losses(self.net, balance=0.01, z=0.001)``
    """
    mixtures = [child for child in module.modules() if isinstance(child, MoE)]
    found = [
        _losses_of(mixture, each, balance, z) for mixture in mixtures if (each := mixture.router_logits) is not None
    ]
    if not found or len(found) < len(mixtures):
        raise ValueError(
            f"`router_losses` found {len(mixtures)} `MoE` in {type(module).__name__}, of which "
            f"{len(mixtures) - len(found)} have not been called; call the model first."
        )
    return torch.stack(found).mean()


def _losses_of(mixture: MoE, logits: Tensor, balance: float, z: float) -> Tensor:
    term = balance * load_balancing_loss_func((logits,), mixture.router.out_features, mixture.top_k)
    return term + z * logits.logsumexp(-1).square().mean()
