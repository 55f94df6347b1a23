"""Layers that mix tokens, and losses that read them, in ways of their own, each written by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import local_weights, make_trainer
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.tasks import TokenTask

HIDDEN, HEADS, WIDTH = 24, 4, 6
Heads = tuple[Tensor, Tensor, Tensor]


class Mixer(nn.Module):
    """Norm, a mix of tokens, a residual and an MLP; subclasses mix."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.qkv, self.pair = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, 2 * WIDTH)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.place, self.per_head = (nn.Parameter(torch.randn(16, size) * 0.1) for size in (HIDDEN, HEADS))
        self.router, self.heads_mixed = nn.Linear(HIDDEN, 1), nn.Linear(HEADS, HEADS)
        self.over_tokens = nn.Linear(length, length)

    def heads(self, y: Tensor) -> Heads:
        """[batch, heads, tokens, width], three times."""
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        return q, k, v

    def joined(self, found: Tensor) -> Tensor:
        """The opposite, and a product."""
        return self.out(found.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, other: Any = None) -> Any:
        found = self.mix(self.norm(x), other)
        mixed, other = found if isinstance(found, tuple) else (found, None)
        x = x + mixed
        x = x + self.down(F.gelu(self.up(x)))
        return x if other is None else (x, other)

    def mix(self, y: Tensor, other: Any) -> Any:
        """Of [batch, tokens, features]."""
        raise NotImplementedError


class Einsum(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH)) for part in self.qkv(y).chunk(3, -1))
        hidden = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1)
        scores = torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(hidden, -1e9).softmax(-1)
        return self.out(torch.einsum("bhij,bjhd->bihd", scores, v).reshape(y.shape))


class MultiQuery(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        batch, length, _ = y.shape
        (k, v), q = self.pair(y).split(WIDTH, -1), self.qkv(y)[..., :HIDDEN].reshape(batch, length * HEADS, WIDTH)
        scores = (q @ k.transpose(1, 2)).view(batch, length, HEADS, length)
        seen = torch.ones(length, length).tril().bool()[None, :, None]
        weights = torch.where(seen, scores, torch.finfo(scores.dtype).min).softmax(-1)
        return self.out(torch.bmm(weights.view(batch, length * HEADS, length), v).view(batch, length, HIDDEN))


class TwoStreams(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        (q, k, v), (q2, k2, v2) = self.heads(y), self.heads(self.norm(other))
        mine = F.scaled_dot_product_attention(q, torch.cat([k, k2], 2), torch.cat([v, v2], 2))
        return self.joined(mine), other + self.joined(F.scaled_dot_product_attention(q2, k, v))


class Buckets(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        q, k, v = self.heads(y)
        return self.joined((q @ k.transpose(-1, -2) + other).softmax(-1) @ v)


class TalkingHeads(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        q, k, v = self.heads(y)
        scores = torch.einsum("bhij,gh->bgij", q @ k.mT, self.heads_mixed.weight).softmax(-1)
        return self.joined(self.heads_mixed(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v)


class Linear(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        q, k, v = (part.transpose(1, 2) for part in self.heads(y))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        sums = torch.einsum("bshd,bshe->bshde", k, v).cumsum(1)
        return self.out(
            (torch.einsum("bshd,bshde->bshe", q, sums) / (q * k.cumsum(1)).sum(-1, keepdim=True)).flatten(2)
        )


class Local(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        length, more = y.shape[1], -y.shape[1] % 3
        q, k, v = (F.pad(part, (0, 0, 0, more)).unflatten(2, (-1, 3)) for part in self.heads(y))
        return self.joined(((q @ k.mT).softmax(-1) @ v).flatten(2, 3)[:, :, :length])


class Unfolded(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        q, k, v = self.heads(y)
        k, v = (F.pad(part, (0, 0, 2, 0)).unfold(2, 3, 1) for part in (k, v))
        return self.joined((v * (q.unsqueeze(-1) * k).sum(3, keepdim=True).softmax(-1)).sum(-1))


class ComplexRotary(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        angles = torch.outer(torch.arange(y.shape[1]).double(), 0.1 ** torch.arange(WIDTH // 2).double())
        turn, (q, k, v) = torch.polar(torch.ones_like(angles), angles), self.heads(y)
        q, k = (torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turn for part in (q, k))
        q, k = (torch.view_as_real(part).flatten(-2) for part in (q, k))
        return self.joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Sinks(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        (batch, length, _), (q, k, v) = y.shape, self.heads(y)
        scores = (q @ k.mT).masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
        scores = torch.cat([scores, self.per_head[0].reshape(1, -1, 1, 1).expand(batch, -1, length, -1)], -1)
        return self.joined((scores - scores.max(-1, keepdim=True).values).softmax(-1)[..., :-1] @ v)


class TokenShift(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        share = self.place[0].sigmoid()
        gate, key, value = self.qkv(y * share + F.pad(y, (0, 0, 1, -1)) * (1 - share)).chunk(3, -1)
        decay, found, above, below = torch.exp(-self.place[1].exp()), [], 0.0, 0.0
        for token in range(y.shape[1]):
            weight = key[:, token].exp()
            above, below = above * decay + weight * value[:, token], below * decay + weight
            found.append(above / (below + 1e-3))
        return self.out(torch.stack(found, 1) * gate.sigmoid())


class Depths(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        scores = self.router(y)
        chosen = scores.squeeze(-1).topk(3, dim=1).indices.sort(1).values.unsqueeze(-1)
        places = chosen.expand(-1, -1, HIDDEN)
        found = self.out(y.gather(1, places)) * scores.gather(1, chosen).sigmoid()
        return torch.zeros_like(y).scatter_add(1, places, found)


class Dropped(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        scores = self.router(y).squeeze(-1)
        kept, found = scores > scores.median(dim=1, keepdim=True).values, torch.zeros_like(y)
        found[kept] = self.out(y[kept]) * scores[kept].sigmoid()[:, None]
        return found


class OverTokens(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        return self.over_tokens(y.transpose(1, 2)).transpose(1, 2) + torch.fft.fft2(y).real * 0.1


class InPlace(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        found = self.out(y)
        found[:, 0] += self.place[0]
        found[:, 1:3] = found[:, 1:3] * 2
        found.select(1, 3).mul_(0.5)
        found.mul_(0.5).add_(self.place[: y.shape[1]])
        return found


class ShownWeights(Mixer):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

    def mix(self, y: Tensor, other: Any) -> Any:
        found, weights = self.attention(y, y, y, attn_mask=torch.ones(*y.shape[1:2] * 2, dtype=torch.bool).triu(1))
        per_head = self.attention(y, y, y, average_attn_weights=False)[1]
        return found + weights.sum(1).unsqueeze(-1) + per_head.square().sum((1, 3)).unsqueeze(-1)


class CarriedScores(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        q, k, v = self.heads(y)
        scores = q @ k.mT + (0 if other is None else other)
        return self.joined(scores.softmax(-1) @ v), scores


class RelativeShift(Mixer):
    def mix(self, y: Tensor, other: Any) -> Any:
        length, (q, k, v) = y.shape[1], self.heads(y)
        moved = F.pad(q @ self.place[:length, :WIDTH].T, (1, 0)).view(len(y), HEADS, length + 1, length)
        scores = q @ k.mT + moved[:, :, 1:].view(len(y), HEADS, length, length)
        return self.joined(scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf).softmax(-1) @ v)


class Carried(Mixer):
    """Linear attention, block by block, of which some rank may have no token."""

    def mix(self, y: Tensor, other: Any) -> Any:
        q, k, v = self.heads(y)
        state, found = torch.zeros(len(y), HEADS, WIDTH, WIDTH, dtype=y.dtype), []
        decay = torch.tensor([[1.0, 0.0], [0.5, 1.0]], dtype=y.dtype)
        for start in range(0, y.shape[1], 2):
            one, keys, values = (part[:, :, start : start + 2] for part in (q, k, v))
            scores = (one @ keys.mT) * decay[: one.shape[2], : one.shape[2]]
            found.append(scores @ values + (one * decay[: one.shape[2], :1]) @ state)
            state = 0.5 * state + (keys * 0.9).mT @ values
        return self.joined(torch.cat(found, 2))


MIXERS = {kind.__name__: kind for kind in Mixer.__subclasses__()}
ENDS = ("class token", "stem", "registers", "reward", "two tokens ahead", "ctc", "dice", "token by token")


class Odd(TokenTask):
    """Two layers of one kind, or a loss of one kind."""

    def __init__(self, kind: str, length: int) -> None:
        super().__init__()
        self.kind, self.length = kind, length
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.position = nn.Embedding(length, HIDDEN)  # tokens that are alike would be chosen among by rounding
        self.layers = nn.ModuleList(MIXERS.get(kind, Sinks)(length) for _ in range(2))
        self.bias, self.more = nn.Embedding(8, HEADS), nn.Parameter(torch.randn(2, HIDDEN))
        self.stem, self.score = nn.Conv1d(HIDDEN, HIDDEN, 3, stride=2, padding=1), nn.Linear(HIDDEN, 2)
        self.second = nn.Linear(2 * HIDDEN, VOCABULARY)

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = (part[:, : self.length] for part in batch)
        x, other = self.embedding(tokens) + self.position(torch.arange(self.length)), None
        if self.kind == "class token":
            x = torch.cat([self.more[:1].expand(len(x), 1, HIDDEN), x], 1)
        if self.kind == "registers":
            x = torch.cat([x, self.more.expand(len(x), 2, HIDDEN)], 1)
        if self.kind == "stem":
            x = F.gelu(self.stem(x.mT)).mT
        if self.kind == "Buckets":
            at = torch.arange(x.shape[1])
            other = self.bias((at[:, None] - at).abs().clamp(max=7)).permute(2, 0, 1).unsqueeze(0)
        if self.kind == "TwoStreams":
            other = self.embedding(tokens.flip(1)[:, :5]) * 0.5
        for layer in self.layers:
            found = layer(x, other)
            x, other = found if isinstance(found, tuple) else (found, other)
        if self.kind in ("TwoStreams", "CarriedScores"):
            return F.cross_entropy(self.head(x).mT, targets) + other.square().mean()
        return self.ending(x, tokens, targets)

    def ending(self, x: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        if self.kind == "class token":
            return F.cross_entropy(self.head(x[:, 0]), targets[:, 0])
        if self.kind == "stem":
            x = x.repeat_interleave(2, 1)[:, : targets.shape[1]]
        if self.kind == "registers":
            return F.cross_entropy(self.head(x[:, :-2]).mT, targets) + self.head(x[:, -2:]).square().mean()
        if self.kind == "reward":
            reward, last = self.score(x)[..., 0], (tokens % 7 != 0).long().cumsum(1).argmax(1)
            return F.softplus(-reward[torch.arange(len(x)), last]).mean() + reward.gather(1, last[:, None]).mean()
        if self.kind == "two tokens ahead":
            ahead = torch.cat([x[:, :-2], self.embedding(tokens[:, 1:-1])], -1)
            first = F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            return first + F.cross_entropy(self.second(ahead).flatten(0, 1), tokens[:, 2:].flatten())
        if self.kind == "ctc":
            sizes = torch.full((2, len(x)), x.shape[1])
            sizes[1] = 2
            return F.ctc_loss(self.head(x).log_softmax(-1).transpose(0, 1), targets[:, :2] % 28 + 1, *sizes)
        if self.kind == "dice":
            found, wanted = self.score(x)[..., 0].sigmoid(), (targets % 2).to(x.dtype)
            shared = 2 * (found * wanted).sum(1) / (found.sum(1) + wanted.sum(1))
            return 1 - shared.mean() + F.binary_cross_entropy(found, wanted)
        if self.kind == "token by token":
            parts = [F.cross_entropy(self.head(x[:, at]), targets[:, at]) * (at + 1) for at in range(x.shape[1])]
            return torch.stack(parts).sum()
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def train(info: RankInfo, kind: str, length: int, arguments: dict[str, Any] | None) -> dict[str, Any]:
    """Metrics and weights of a run; of a plain one without arguments."""
    torch.manual_seed(7)
    module = Odd(kind, length)
    strategy: Any = "auto" if arguments is None else MegatronStrategy(**arguments)
    trainer = make_trainer(info, strategy, max_steps=2, limit_val_batches=1)
    trainer.fit(module)
    whole = "tensor_parallel_size" in (arguments or {})
    weights = strategy.full_state_dict() if whole else local_weights(module)
    found: dict[str, Any] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return found | {name: value.detach().double().clone() for name, value in weights.items()}
