"""Layers that strangers bring: token by token besides attention, or not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS = 24, 4


class Block(nn.Module):
    """Causal attention and an MLP, with dropout behind both if asked for."""

    def __init__(self, dropout: float = 0.0, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_dropout, is_causal=True)
        x = x + F.dropout(self.out(found.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.dropout)


class Modules(nn.Module):
    """Attention, and an MLP that is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class RotatedWindow(nn.Module):
    """Rotary positions and a window, made in the layer; shared keys; a count of its calls; sums in place."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        size = WIDTH // HEADS
        angles = torch.outer(torch.arange(x.shape[1]), 0.3 ** torch.arange(size // 2)).repeat(1, 2).to(x.dtype)
        q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in (self.q(x), *self.kv(x).chunk(2, -1)))
        q, k = (
            z * angles.cos() + torch.cat([-z[..., size // 2 :], z[..., : size // 2]], -1) * angles.sin() for z in (q, k)
        )
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-4)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        found = found.transpose(1, 2).flatten(2) * x
        x = x * 1.0
        x += F.silu(found, inplace=True)
        return x


class Conjugates(nn.Module):
    """Complex features, of which a product saves the conjugates: the same memory, read otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.linear(x).unflatten(-1, (WIDTH // 2, 2)))
        turned = z.conj() * torch.fft.fft(z) * z
        return x + torch.view_as_real(turned).flatten(-2) + (turned.conj().imag * z.real).repeat(1, 1, 2)


class TorchsLayer(nn.Module):
    """torch's own, with tokens first if asked for."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Positions(nn.Module):
    """A table of positions that is trained, and numbers of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(19, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x + self.table).tanh() * torch.arange(19.0)[:, None]


class ByHand(nn.Module):
    """Attention by matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.softmax(self.linear(x) @ x.mT, -1) @ x


class Heads(nn.Module):
    """Attention by matrix products of several heads; what is done with its scores is a subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixed, self.bias = nn.Linear(HEADS, HEADS), nn.Parameter(torch.randn(HEADS, 19, 19))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return x + self.out(self.attend(q, k, v, hidden).transpose(1, 2).flatten(2)).tanh()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(hidden, -torch.inf)
        return F.dropout(scores.softmax(-1), 0.2) @ v


class OneKey(Heads):
    """All heads share one head of keys and values, by an expanded view."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        k, v = (part[:, :1].expand(q.shape) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Capped(Heads):
    """A soft cap, a trained bias, and a softmax by hand that goes on with its sums."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores = 5 * torch.tanh(q @ k.transpose(-1, -2) / 5) + self.bias
        scores = torch.where(hidden, torch.full((), -torch.inf, device=scores.device), scores)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights @ v / weights.sum(-1, keepdim=True)


class Talking(Heads):
    """Scores of heads are mixed, and a column stands for no key at all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores = self.mixed(torch.matmul(q, k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        scores = scores.masked_fill(hidden, -1e9)
        none = self.bias[:, :1, :1].expand(*scores.shape[:3], 1)
        return torch.cat([scores, none], -1).softmax(-1)[..., :-1].matmul(v)


class Alibi(Heads):
    """Batches and heads in one dim, a bias added by the product."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        far = torch.arange(q.shape[2], dtype=q.dtype).expand(q.shape[0] * HEADS, 1, -1)
        q, k, flat = (part.reshape(-1, *part.shape[2:]) for part in (q, k, v))
        scores = far.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=0.1, alpha=0.5)
        weights = scores.view(*v.shape[:3], -1).masked_fill(hidden, -1e9).softmax(-1)
        return torch.bmm(weights.view(-1, *weights.shape[2:]), flat).view(v.shape)


class Judged(Heads):
    """Looks at the values of scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores = q @ k.mT
        kept = scores > scores.flatten(-2).kthvalue(3, -1).values[..., None, None]
        return scores.masked_fill(~kept, 0.0) @ v


class Convolution(nn.Module):
    """Neighbours are read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.mT).mT


class Pooled(nn.Module):
    """A mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x)
        return x + found * found.mean(1, keepdim=True)


class Shifted(Pooled):
    """The token before."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(self.linear(x)[:, :-1], (0, 0, 1, 0))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class CustomFunction(Pooled):
    """A function that torch's functions do not see."""

    def forward(self, x: Tensor) -> Tensor:
        return x + _Square.apply(self.linear(x)).tanh()


class Checkpointed(Pooled):
    """Decides itself what it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._inner, x, use_reentrant=False)

    def _inner(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Noisy(Pooled):
    """Noise of its own."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x)
        return x + found * torch.randn_like(found)
