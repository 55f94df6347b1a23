"""Modules whose split layers are read, or act, somewhere else than in front of their row-parallel layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parallelize.models import Block, CausalSelfAttention

WIDTH, HIDDEN = 32, 48


class Autoencoder(nn.Module):
    """Returns its hidden units, which a penalty reads."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Any:
        hidden = F.relu(self.enc(x))
        return self.dec(hidden), hidden.abs().sum(-1)


class KeepsHidden(Autoencoder):
    """Leaves the penalty in an attribute."""

    def forward(self, x: Tensor) -> Any:
        hidden = F.relu(self.enc(x))
        self.penalty = [hidden.abs().sum(-1)]
        return self.dec(hidden)


class CountsActive(Autoencoder):
    """Returns the share of active units, without a gradient."""

    def forward(self, x: Tensor) -> Any:
        hidden = F.relu(self.enc(x))
        return self.dec(hidden), (hidden.detach() > 0).to(x.dtype).mean(-1)


class ProbesHidden(Autoencoder):
    """A classifier reads the hidden units without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = F.relu(self.enc(x))
        return self.dec(hidden), self.probe(hidden.detach())


class TrainingNorm(Autoencoder):
    """Divides by the norm of all hidden units in training only."""

    def forward(self, x: Tensor) -> Any:
        hidden = F.dropout(F.relu(self.enc(x)), 0.0, self.training)
        return self.dec(hidden / hidden.norm(dim=-1, keepdim=True) if self.training else hidden)


class _Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return (grad - grad.mean(-1, keepdim=True)) / 3


class CentredGradient(Autoencoder):
    """A backward of its own takes the mean over all hidden units."""

    def forward(self, x: Tensor) -> Any:
        return self.dec(_Centred.apply(self.enc(x)))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class ScaledAttention(CausalSelfAttention):
    """Scales its queries by a parameter that scales its input as well."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__(width, heads)
        self.shared = Scale()

    def forward(self, x: Tensor) -> Tensor:
        packed = self.c_attn(self.shared(x))
        batch, length = packed.shape[:2]
        q, k, v = packed.split(self.n_embd, dim=2)
        q, k, v = (y.view(batch, length, self.n_head, -1).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(self.shared(q), k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Penalised(nn.Module):
    """Returns the size of its weights beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH, 4, CausalSelfAttention)

    def forward(self, x: Tensor) -> Any:
        return self.block(x), sum(p.square().sum() for p in self.parameters())


class GatedByInput(nn.Module):
    """A layer whose input gates the hidden units, in a network that no tiny input fits."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(5, WIDTH))
        self.layers = nn.ModuleList([_Gate() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        for layer in self.layers:
            x = x + layer(x)
        return x


class _Gate(Autoencoder):
    def forward(self, x: Tensor) -> Any:
        return self.dec(F.gelu(self.enc(x)) * torch.sigmoid(x.mean(-1, keepdim=True)))


class Flattening(Autoencoder):
    """Pairs up hidden units of flattened tokens before they are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mix, self.down = nn.Linear(WIDTH, 8), nn.Bilinear(8, 8, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x).reshape(-1, 8)
        return self.down(torch.tanh(self.mix(hidden, hidden))).view_as(x)


class Convolving(Autoencoder):
    """Mixes neighbouring tokens before what is split, as ConvNeXt does."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Any:
        near = self.norm(self.near(x.transpose(1, 2)).transpose(1, 2))
        return x + self.down(torch.tanh(self.up(near)))


class Stack(nn.Module):
    """Layers of one kind under an embedding, with a residual connection inside the layers' own code or around it."""

    def __init__(self, kind: Any, around: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList([kind() for _ in range(2)])
        self.around = around

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x) if self.around else layer(x)
        return x


class WritesResidual(nn.Module):
    """Adds its residual in place to what a row-parallel layer without a bias gives, as Falcon does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        out += x
        return out


class Conditioned(Block):
    """Scales its output by an argument."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


class TableAttention(nn.Module):
    """Projects a table that all layers share like its keys, as DeBERTa does."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        query, key, value = (self._heads(part(hidden)) for part in (self.query, self.key, self.value))
        places = self._heads(self.key(table)[None].expand(len(hidden), -1, -1))
        scores = query @ key.transpose(-1, -2) + (query @ places.transpose(-1, -2)).sin().mean(-1, keepdim=True)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, WIDTH // 4).transpose(1, 2)


class TableLayer(nn.Module):
    """A layer around such attention, whose input a parameter of all layers shifts.

    Args:
        after: whether the table also scales the output.
    """

    def __init__(self, after: bool = False) -> None:
        super().__init__()
        self.norm, self.attention, self.after = nn.LayerNorm(WIDTH), TableAttention(), after

    def forward(self, x: Tensor, table: Tensor, shift: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x) + shift, table)
        return x * table.mean() if self.after else x


class Tables(nn.Module):
    """Layers that are given a normalised table of places and a parameter.

    Args:
        kind: makes a layer.
    """

    def __init__(self, kind: Any = TableLayer) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(50, WIDTH), nn.Embedding(6, WIDTH)
        self.norm, self.shift = nn.LayerNorm(WIDTH), nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.layers = nn.ModuleList([kind() for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x, table = self.embed(ids), self.norm(self.table.weight)
        for layer in self.layers:
            x = layer(x, table, self.shift)
        return x


class Conditions(nn.Module):
    """Layers given a parameter, with further ones between them.

    Args:
        after: whether the parameter also acts after the layers, on all tokens.
        mean: whether layers are given a mean over tokens instead.
    """

    def __init__(self, after: bool = False, mean: bool = False) -> None:
        super().__init__()
        self.embed, self.after, self.mean = nn.Embedding(50, WIDTH), after, mean
        self.layers = nn.ModuleList([Conditioned(WIDTH, 4, CausalSelfAttention) for _ in range(2)])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.gates = nn.ParameterList([torch.linspace(1.5, 0.5, WIDTH) for _ in range(1)])

    def forward(self, ids: Tensor) -> Tensor:
        first, second = self.layers
        x = first(self.embed(ids), self.scale) * self.gates[0]
        x = second(x, x.mean(1, keepdim=True) if self.mean else self.scale)
        return x * self.scale if self.after else x


class Exits(Stack):
    """Gives what a head makes of each layer's output, as for early exits and deep supervision.

    Args:
        by_layers: whether each layer has a head of its own, whose logits it returns besides its output.
    """

    def __init__(self, by_layers: bool = False) -> None:
        kind = ExitBlock if by_layers else Block
        super().__init__(lambda: kind(WIDTH, 4, CausalSelfAttention))
        self.head, self.by_layers = nn.Linear(WIDTH, 50), by_layers

    def forward(self, ids: Tensor) -> Any:
        x, exits = self.embed(ids), []
        for layer in self.layers:
            x, logits = layer(x) if self.by_layers else (layer(x), None)
            exits.append(self.head(x) if logits is None else logits)
        return torch.stack(exits)


class ExitBlock(Block):
    """Returns logits besides its output."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.exit = nn.Linear(WIDTH, 50)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        x = super().forward(x)
        return x, self.exit(x)


class Coupling(nn.Module):
    """A layer of a normalising flow: returns the logarithm of its determinant besides its output, or adds it to one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH // 2, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept, changed = x.chunk(2, -1)
        scale, shift = self.down(torch.tanh(self.up(kept))).chunk(2, -1)
        scale = torch.tanh(scale)
        found = scale.sum(-1)
        return torch.cat([changed * scale.exp() + shift, kept], -1), found if total is None else total + found


class Flow(nn.Module):
    """A normalising flow.

    Args:
        passes: whether layers are given the sum of the layers before.
    """

    def __init__(self, passes: bool = False) -> None:
        super().__init__()
        self.embed, self.passes = nn.Embedding(50, WIDTH), passes
        self.layers = nn.ModuleList([Coupling() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        total = x.new_zeros(x.shape[:2])
        for layer in self.layers:
            if self.passes:
                x, total = layer(x, total)
            else:
                x, found = layer(x)
                total = total + found
        return x.square().sum(-1) - total


class MeanOfTokens(nn.Module):
    """Gives layers a mean over the tokens that earlier layers gave."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(50, WIDTH), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.layers = nn.ModuleList([Conditioned(WIDTH, 4, CausalSelfAttention) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x, scale = self.embed(ids), self.first
        for layer in self.layers:
            x = layer(x, scale)
            scale = x.mean(1, keepdim=True)
        return x * scale


LEAKY = (Autoencoder, KeepsHidden, CountsActive, ProbesHidden, TrainingNorm, CentredGradient, ScaledAttention)


class MixedByTable(nn.Module):
    """Layers whose tokens are mixed, in a module of its own, by a trained table that all of them are given."""

    class Mix(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            length = x.shape[1]
            return table[:length, :length].softmax(-1) @ x

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.up, self.down = MixedByTable.Mix(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            x = x + self.mix(x, table)
            return x + self.down(F.gelu(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, WIDTH), nn.ModuleList(MixedByTable.Layer() for _ in range(2))
        self.table = nn.Parameter(torch.rand(64, 64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.table)
        return x
