"""Modules that know nothing of context ranks, as strangers bring them: masks, biases, mixers of tokens, heads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.tasks import TokenTask

HIDDEN, HEADS, WIDTH = 24, 6, 4
MASKS = ("window", "alibi", "relative", "prefix", "packed", "given", "dead")
MIXERS = ("eager", "rotary", "convolution", "batch_norm", "cumulative", "grouped", "function", "scan")
POOLED = ("mean", "last", "weighted", "highest", "picked")


class Gelu(torch.autograd.Function):
    """Of each token by itself, as BLOOM has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """By its own backward."""
        ctx.save_for_backward(x)
        return x * torch.sigmoid(1.7 * x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Of the sigmoid."""
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(1.7 * x)
        return grads[0] * (gate + 1.7 * x * gate * (1 - gate))


class Scan(torch.autograd.Function):
    """A running sum of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Forwards."""
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Backwards."""
        return grads[0].flip(1).cumsum(1).flip(1)


scan = Scan.apply


class Block(nn.Module):
    """Attention and an MLP, of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, shared = kind, 2 if kind == "grouped" else HEADS
        self.norm, self.query = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HEADS * WIDTH)
        self.key, self.value = nn.Linear(HIDDEN, shared * WIDTH), nn.Linear(HIDDEN, shared * WIDTH)
        self.out, self.mlp = nn.Linear(HEADS * WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.bias = nn.Embedding(8, HEADS) if kind == "relative" else None
        self.batch_norm = nn.BatchNorm1d(HIDDEN) if kind == "batch_norm" else None
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, groups=HIDDEN) if kind == "convolution" else None

    def mask(self, ids: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Of the tokens: [.., tokens, tokens], or ``None`` for a plain causal one."""
        at = torch.arange(ids.shape[1])
        distance, causal = at[:, None] - at, at[:, None] >= at
        if self.kind == "window":
            return causal & (distance < 4)
        if self.kind == "alibi":
            slopes = torch.tensor([2.0 ** -(i + 1) for i in range(HEADS)], dtype=dtype)
            return (-slopes[:, None, None] * distance).masked_fill(~causal, -math.inf)
        if self.bias is not None:
            return self.bias(distance.clamp(0, 7)).permute(2, 0, 1).masked_fill(~causal, -math.inf)
        if self.kind == "prefix":
            return causal | (at < 5)
        if self.kind in ("packed", "given"):
            document = (ids % 5 == 0).cumsum(1)
            return ((document[:, :, None] == document[:, None]) & causal)[:, None]
        return ((ids % 3 != 0)[:, None, :] & causal)[:, None] if self.kind == "dead" else None

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm(x)
        if self.conv is not None:
            y = self.conv(y.transpose(1, 2))[..., :length].transpose(1, 2)
        if self.batch_norm is not None:
            y = self.batch_norm(y.transpose(1, 2)).transpose(1, 2)
        parts = self.query(y), self.key(y), self.value(y)
        q, k, v = (part.view(batch, length, -1, WIDTH).transpose(1, 2) for part in parts)
        if self.kind == "rotary":
            q, k = _rotated(q), _rotated(k)
        mask = self.mask(ids, x.dtype) if mask is None else mask
        if self.kind == "eager":
            at = torch.arange(length)
            found = ((q @ k.mT) / math.sqrt(WIDTH)).masked_fill(at > at[:, None], -math.inf).softmax(-1) @ v
        else:
            options: dict[str, Any] = {"is_causal": mask is None, "enable_gqa": self.kind == "grouped"}
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        if self.kind == "dead":
            found = found.nan_to_num()
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, -1))
        if self.kind == "cumulative":
            x = x + x.cumsum(1) / torch.arange(1, length + 1)[:, None]
        if self.kind == "scan":
            x = x + scan(x) / torch.arange(1, length + 1)[:, None]  # type: ignore[no-untyped-call]
        if self.kind == "function":
            return x + Gelu.apply(self.mlp(x))  # type: ignore[no-untyped-call]
        return x + F.gelu(self.mlp(x))


def _rotated(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 10 ** torch.arange(WIDTH // 2)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    return torch.stack(turned, -1).flatten(-2)


class Stranger(TokenTask):
    """A decoder of blocks of one kind, or with a head of one kind; of an odd number of tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embedding, self.head = kind, nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = (part[:, :7] for part in batch)
        x = self.embedding(tokens)
        given = [self.layers[0].mask(tokens, x.dtype)] if self.kind == "given" else []  # type: ignore[operator]
        for layer in self.layers:
            x = layer(x, tokens, *given)
        if self.kind == "mean":
            return F.cross_entropy(self.head(x.mean(1)), targets[:, 0])
        if self.kind == "last":
            return F.cross_entropy(self.head(x[:, -1]), targets[:, -1])
        if self.kind == "highest":
            return F.cross_entropy(self.head(x.max(1).values), targets[:, 0])
        if self.kind == "picked":
            return F.cross_entropy(self.head(x[torch.arange(len(x)), tokens[:, 0] % 7]), targets[:, 0])
        if self.kind == "weighted":
            kept = (tokens % 4 != 0).to(x.dtype) + 0.1
            losses = F.cross_entropy(self.head(x).transpose(1, 2), targets, reduction="none")
            return ((losses * kept).sum(1) / kept.sum(1)).mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def train(info: RankInfo, kind: str, context: int, method: Any) -> dict[str, Any]:
    """Metrics and weights of a run; a plain one for no context ranks."""
    torch.manual_seed(7)
    module = Stranger(kind)
    strategy: Any = "auto"
    if context:
        strategy = MegatronStrategy(context_parallel_size=context, context_parallel_options={"method": method})
    trainer = make_trainer(info, strategy, max_steps=2, limit_val_batches=1)
    trainer.fit(module)
    found: dict[str, Any] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return found | {name: value.detach().double() for name, value in module.state_dict().items()}
