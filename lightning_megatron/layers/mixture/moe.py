"""A mixture of experts to build models from; a plain module, whose experts any ``expert_parallel_size`` shares out.

Every token goes to the ``top_k`` experts that its router likes best (Shazeer et al., arXiv 1701.06538), and to the
shared expert, if there is one (DeepSeekMoE, arXiv 2401.06066). No token is dropped, unless a capacity is given.

What is of the whole batch goes through two functions of this file, :func:`balancing_loss` and :func:`places_in_queues`.
Over replicas :class:`~lightning_megatron.MegatronStrategy` puts what all of them have into their arguments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_megatron.layers.mixture.beside import Beside
from lightning_megatron.layers.mixture.experts import Experts, feed_forward

ROUTERS = ("softmax", "sigmoid")
SCOPES = ("batch", "sequence")
_KEPT = ("router_logits", "choices", "mean_scores", "sequence_balance", "z")


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
        capacity_factor: how many tokens an expert takes from a batch of training at most, over the mean, 1 or more:
            ``ceil(capacity_factor · top_k · tokens / experts)``, or ``least_capacity`` if that is more. Those beyond
            are dropped: first choices of all tokens come before second ones, and tokens in the order of the batch
            (GShard, arXiv 2006.16668; DeepSpeed-MoE). ``x`` is ``[batch, ..., hidden]`` then. In evaluation, and with
            ``None``, none are.
        least_capacity: see there.
        jitter: in training, the router sees ``x`` times random numbers in ``[1 - jitter, 1 + jitter]`` (Switch
            Transformer, arXiv 2101.03961).
        biased: whether a bias is added to the scores where experts are chosen, and not where they are weighed, which
            :class:`~lightning_megatron.callbacks.ExpertBias` moves so that all are chosen equally often (arXiv
            2408.15664).

    Attributes:
        bias: [experts] in 32 bits, if ``biased``; else ``None``.
        router_logits: [tokens, experts] of the latest forward, where its layer ran; ``None`` before, as the following.
        choices: [experts], how many tokens of it have chosen each.
        mean_scores: [experts], the means of the probabilities.
        sequence_balance: its balancing loss of each sequence by itself, the mean over sequences; ``None`` for tokens in
            one dim.
        z: its mean square of the logits' logarithmic sum.

    Raises:
        ValueError: sizes that do not fit together, a capacity below the mean, or an unknown router.

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
        capacity_factor: float | None = None,
        least_capacity: int = 4,
        jitter: float = 0.0,
        biased: bool = False,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"`top_k={top_k}` must lie between 1 and `experts={experts}`.")
        if router not in ROUTERS:
            raise ValueError(f"`router={router!r}` must be one of {', '.join(map(repr, ROUTERS))}.")
        if capacity_factor is not None and not capacity_factor >= 1:
            raise ValueError(
                f"`capacity_factor={capacity_factor}` must be at least 1, with which experts that are chosen equally "
                "often take every token, or None to drop none."
            )
        if least_capacity < 1:
            raise ValueError(f"`least_capacity={least_capacity}` must be at least 1.")
        if not 0 <= jitter < 1:
            raise ValueError(f"`jitter={jitter}` must be at least 0 and below 1.")
        self.top_k, self.kind, self.scale = top_k, router, scale
        self.capacity_factor, self.least_capacity, self.jitter = capacity_factor, least_capacity, jitter
        self.normalize = top_k > 1 if normalize is None else normalize
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(hidden, intermediate, experts, gated=gated)
        self.shared = feed_forward(hidden, shared, gated) if shared else None
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(experts, dtype=torch.float32) if biased else None)
        self.router_logits: Tensor | None = None
        self.choices: Tensor | None = None
        self.mean_scores: Tensor | None = None
        self.sequence_balance: Tensor | None = None
        self.z: Tensor | None = None

    def reset_parameters(self) -> None:
        """Set the bias back to zero; router and experts do so with their own."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x: [..., hidden]`` → the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        seen = rows
        if self.jitter and self.training:
            seen = (x * (1 + self.jitter * (2 * torch.rand_like(x) - 1))).reshape(rows.shape)
        logits = self.router(seen)
        self.router_logits = logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if self.kind == "softmax" else logits.sigmoid()
        weights, index = self._choose(scores)
        self._keep(logits, index, x.shape[:-1])
        if self.capacity_factor is not None and self.training:
            weights, index = self._dropped(weights, index, self.capacity_factor, x.shape[:-1])
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        return self._mixed(rows, index, (weights * self.scale).to(rows.dtype)).view(x.shape)

    def _mixed(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The experts' weighted sum, and what the shared one makes of rows while others are on their way."""
        if self.shared is None:
            return self.experts(rows, index, weights)  # type: ignore[no-any-return]
        shared = Beside(functools.partial(self.shared, rows))
        with self.experts.running(shared):
            out = self.experts(rows, index, weights)
        return out + shared.result()  # type: ignore[no-any-return]

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.bias is None:
            return tuple(scores.topk(self.top_k))  # type: ignore[return-value]
        index = (scores.detach() + self.bias).topk(self.top_k).indices
        return scores.gather(-1, index), index

    def _dropped(self, weights: Tensor, index: Tensor, factor: float, lead: torch.Size) -> tuple[Tensor, Tensor]:
        """Weights 0 and experts beyond the last for choices whose expert is full."""
        experts = self.router.out_features
        place, tokens = places_in_queues(index, experts, lead)
        capacity = max(math.ceil(factor * self.top_k * tokens / experts), self.least_capacity)
        full = place >= capacity
        return weights.masked_fill(full, 0.0), index.masked_fill(full, experts)

    def _keep(self, logits: Tensor, index: Tensor, lead: torch.Size) -> None:
        """Keep what :func:`router_losses` are made of."""
        experts = self.router.out_features
        with torch.no_grad():
            chosen = torch.zeros_like(logits).scatter_add(-1, index, torch.ones_like(index, dtype=logits.dtype))
        probability = logits.softmax(-1)
        self.choices, self.mean_scores = chosen.sum(0), probability.mean(0)
        self.z = logits.logsumexp(-1).square().mean()
        self.sequence_balance = None
        if len(lead) > 1:
            each, mean = (values.view(-1, lead[-1], experts).mean(1) for values in (chosen, probability))
            self.sequence_balance = experts * (each * mean).sum(-1).mean()

    def _apply(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> MoE:
        """Move or convert it; the bias stays in 32 bits, of which 16 would lose its small steps."""
        kept = self.bias
        super()._apply(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        if kept is not None and self.bias is not None and self.bias.dtype != torch.float32:
            self.bias = kept.to(self.bias.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Without what the latest forward has kept, whose graph cannot be copied."""
        return {**self.__dict__, **dict.fromkeys(_KEPT)}


def places_in_queues(index: Tensor, experts: int, lead: torch.Size) -> tuple[Tensor, int]:
    """The place of each choice in the queue of its expert, and how many tokens there are in the batch.

    All first choices come before all second ones, and tokens in their order. Over replicas they are counted in the
    batch of all.

    Args:
        index: [tokens, k] numbers of experts.
        experts: how many there are.
        lead: dims of the tokens, of which the first is that of samples.

    Example:
        Choices [[0, 1], [0, 2], [1, 0]] have the places [[0, 1], [1, 0], [0, 2]]: expert 0 is the first choice of
        tokens 0 and 1, and the second of token 2.
    """
    queue = index.t().reshape(-1)
    order = queue.argsort(stable=True)
    first = queue.bincount(minlength=experts).cumsum(0).roll(1)
    first[0] = 0
    place = torch.empty_like(queue)
    place[order] = torch.arange(len(queue), device=queue.device) - first[queue[order]]
    return place.view(index.shape[1], -1).t(), len(index)


def balancing_loss(mean_scores: Tensor, choices: Tensor, tokens: Tensor) -> Tensor:
    """``E · Σ_i f_i P_i``: f_i the share of tokens that choose expert i, P_i its mean probability (Switch Transformer,
    arXiv 2101.03961, eq. 4-6); top_k where all experts are equally liked.

    Over replicas :class:`~lightning_megatron.MegatronStrategy` gives it the choices of all of them.

    Args:
        mean_scores: P, [experts].
        choices: how many tokens have chosen each expert, [experts].
        tokens: how many there are, a scalar.
    """
    return len(choices) * (choices / tokens * mean_scores).sum()


def router_losses(module: nn.Module, *, balance: float = 0.0, z: float = 0.0, scope: str = "batch") -> Tensor:
    """Losses that the mixtures in ``module`` add to that of the step that has just called them.

    Args:
        module: with one :class:`MoE` or more.
        balance: factor of :func:`balancing_loss`; the mean over mixtures.
        z: factor of the mean square of the logits' logarithmic sum (ST-MoE, arXiv 2202.08906, eq. 5).
        scope: of which tokens the balancing loss is: ``"batch"``, of all; ``"sequence"``, of those of each sequence,
            the mean over sequences (DeepSeek-V3, arXiv 2412.19437, eq. 17-20), for ``x: [batch, sequence, hidden]``.
            That is a mean over samples, so batches can be cut into micro-batches.

    Raises:
        ValueError: there is no mixture, or one that has not been called; an unknown scope, or tokens without sequences.

    Example:
        ``loss = cross_entropy(self.net(x), y) + router_losses(self.net, balance=0.01, z=0.001)``
    """
    if scope not in SCOPES:
        raise ValueError(f"`scope={scope!r}` must be one of {', '.join(map(repr, SCOPES))}.")
    mixtures = [child for child in module.modules() if isinstance(child, MoE)]
    called = [mixture for mixture in mixtures if mixture.choices is not None]
    if not called or len(called) < len(mixtures):
        raise ValueError(
            f"`router_losses` found {len(mixtures)} `MoE` in {type(module).__name__}, of which "
            f"{len(mixtures) - len(called)} have not been called; call the model first."
        )
    return torch.stack([losses_of(mixture, balance, z, scope) for mixture in called]).mean()


def losses_of(mixture: MoE, balance: float, z: float, scope: str) -> Tensor:
    """Losses of one mixture; see :func:`router_losses`."""
    choices, means, own = cast(tuple[Tensor, ...], (mixture.choices, mixture.mean_scores, mixture.z))
    term = mixture.sequence_balance
    if not balance:
        return z * own
    if scope == "batch":
        term = balancing_loss(means, choices, choices.sum() / mixture.top_k)
    elif term is None:
        raise ValueError("`scope='sequence'` needs `MoE` to be called with `x: [batch, sequence, hidden]`.")
    return balance * term + z * own
