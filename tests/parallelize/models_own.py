"""More ways in which people write transformers: head counts under any name, packed keys and values, bare containers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parallelize.models import VOCABULARY


class ImageAttention(nn.Module):
    """Fused projection, head count called ``h``, width from the input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.h, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.h, width // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Gated(nn.Module):
    """Gate and up in one projection."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w12, self.w3 = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, -1)
        return self.w3(F.silu(gate) * up)


class ImageBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n1, self.attn = nn.LayerNorm(width), ImageAttention(width, heads)
        self.n2, self.mlp = nn.LayerNorm(width), Gated(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class ImageModel(nn.Module):
    """A vision transformer: no input can be guessed for it, only for its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 16, 32) * 0.1)
        self.blocks = nn.Sequential(*[ImageBlock(32, 4) for _ in range(3)])
        self.head = nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2) + self.position
        return self.head(self.blocks(x).mean(1))


class Translator(nn.Module):
    """torch's own encoder-decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, batch_first=True, dropout=0.0)
        self.out = nn.Linear(32, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.out(self.transformer(self.embed(source), self.embed(target)))


class GroupedAttention(nn.Module):
    """Separate projections, grouped queries, sizes kept twice."""

    def __init__(self, width: int, heads: int, key_value: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep, self.head_dim = heads, key_value, heads // key_value, width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, key_value * self.head_dim, bias=False)
        self.wv = nn.Linear(width, key_value * self.head_dim, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.n_heads, self.head_dim)
        k = self.wk(x).view(batch, length, self.n_kv_heads, self.head_dim).repeat_interleave(self.n_rep, 2)
        v = self.wv(x).view(batch, length, self.n_kv_heads, self.head_dim).repeat_interleave(self.n_rep, 2)
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class Rows(nn.Module):
    """Layers without attention, which take a row for each sample as well as rows of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class BareLayers(nn.Module):
    """Layers that are dictionaries of parts, called one by one by the model; embedding and head tied the other way."""

    def __init__(self, key_value: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(
            [
                nn.ModuleDict(
                    {
                        "n1": nn.RMSNorm(32),
                        "attn": GroupedAttention(32, 4, key_value),
                        "n2": nn.RMSNorm(32),
                        "w1": nn.Linear(32, 48),
                        "w2": nn.Linear(48, 32),
                        "w3": nn.Linear(32, 48),
                    }
                )
                for _ in range(2)
            ]
        )
        self.out = nn.Linear(32, VOCABULARY, bias=False)
        self.embed.weight = self.out.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer["attn"](layer["n1"](x))
            y = layer["n2"](x)
            x = x + layer["w2"](F.silu(layer["w1"](y)) * layer["w3"](y))
        return self.out(x)


class PackedKeyValue(nn.Module):
    """Query apart, key and value in one projection, output inside a Sequential."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 4
        self.to_q, self.to_kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.to_out = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.to_q(x), *self.to_kv(x).chunk(2, -1))
        )
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ListLayers(nn.Module):
    """Layers that are lists of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(
            [
                nn.ModuleList(
                    [
                        nn.LayerNorm(32),
                        PackedKeyValue(32),
                        nn.LayerNorm(32),
                        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
                    ]
                )
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for first, attention, second, mlp in self.layers:
            x = x + attention(first(x))
            x = x + mlp(second(x))
        return self.head(x)


class ThreeInputs(nn.Module):
    """Attention handed one tensor as query, key and value, as textbooks write it; sizes from the query."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = query.shape
        shape = (batch, -1, self.heads, width // self.heads)
        q, k, v = self.to_q(query).view(shape), self.to_k(key).view(shape), self.to_v(value).view(shape)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (width // self.heads) ** 0.5
        scores = scores if mask is None else scores.masked_fill(mask, -torch.inf)
        return self.to_out(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(batch, length, width))


class TextbookLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norms = ThreeInputs(width, heads), nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norms[0](x + self.attention(x, x, value=x, mask=mask))
        return self.norms[1](x + self.feed_forward(x))


class Textbook(nn.Module):
    """A causal post-norm transformer out of these layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.stack = nn.ModuleList([TextbookLayer(32, 4) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        mask, x = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1), self.embed(ids)
        for layer in self.stack:
            x = layer(x, mask)
        return self.head(x)


class Masked(nn.Module):
    """A masked language model whose own step calls its parts: the decoder, tied to the table, is part of no run."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.decoder = Worded(), nn.Linear(32, VOCABULARY)
        self.decoder.weight = self.body.embed.weight


class Worded(nn.Module):
    """Embedding, layers and a head, which others do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY, bias=False)
        self.layers = nn.ModuleList([ImageBlock(32, 4) for _ in range(2)])

    def states(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.states(ids))


class Lent(nn.Module):
    """A layer that makes keys and values, or is given those of an earlier one.

    Args:
        makes: whether it makes them.
    """

    def __init__(self, *, makes: bool) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.kv = nn.Linear(32, 64) if makes else None
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, lent: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        keys, values = lent if self.kv is None else self.kv(x).chunk(2, -1)  # type: ignore[misc]
        x = x + self.out(F.scaled_dot_product_attention(self.query(x), keys, values))
        return x + self.down(F.gelu(self.up(x))), (keys, values)


class Routed(nn.Module):
    """A layer with an MLP for every layer of the model, of which it runs its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.norms = number, nn.ModuleList([nn.LayerNorm(32) for _ in range(2)])
        self.attention = ImageAttention(32, 4)
        self.ways = nn.ModuleList([nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.ways[self.number](self.norms[1](x))


class TiedWays(nn.Module):
    """Layers whose MLPs are tied, so that a weight that one of them runs lies unused in the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.layers = nn.ModuleList([Routed(number) for number in range(2)])
        first, second = (layer.ways for layer in self.layers)
        for name, parameter in first.named_parameters():
            holder, key = name.rsplit(".", 1)
            setattr(second.get_submodule(holder), key, parameter)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
