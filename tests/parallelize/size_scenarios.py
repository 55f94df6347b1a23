"""Modules that read the sizes of their attention elsewhere than between its projections."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import make_trainer

WIDTH, HEADS, VOCABULARY = 32, 4, 64


class SizedAttention(nn.Module):
    """Attention whose code behind the last projection reads a size.

    Args:
        kind: which size, and where it is read.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.kind = HEADS, WIDTH, kind

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
        y = self.c_proj(y.view(batch, length, width))
        if self.kind == "norm of a weight":
            return y / self.c_proj.weight.detach().norm()
        if self.kind == "rows of a weight":
            return y * self.c_attn.weight.shape[0] ** -0.5
        if self.kind == "norm in training" and self.training:
            return y / self.c_attn.weight.detach().norm()
        if self.kind == "kept width":
            return y / math.sqrt(width)
        if self.kind == "width of the input":
            return y * x.shape[-1] ** -0.5
        if self.kind == "width":
            return y / math.sqrt(self.n_embd)
        return y / self.n_head if self.kind == "heads" else y


class SizedLayer(nn.Module):
    """A layer that may scale its attention by the number of heads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), SizedAttention(kind)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.scales = kind == "heads in the layer"

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(self.norm(x))
        x = x + (mixed / self.attention.n_head if self.scales else mixed)
        return x + self.mlp(x)


class Sized(LightningModule):
    """Two such layers; the step, the optimizer or a hook may read the number of heads as well."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers, self.kind = nn.ModuleList([SizedLayer(kind) for _ in range(2)]), kind

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) / (math.log(self.head.weight.shape[0]) if self.kind == "rows of the head" else 1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss = loss * self.layers[0].attention.n_head if self.kind == "heads in the step" else loss
        loss = loss / math.log(self.layers[0].mlp[1].weight.shape[0]) if self.kind == "rows in the step" else loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        by_width = self.kind == "width in the optimizer"
        return torch.optim.AdamW(self.parameters(), lr=0.3 / self.layers[0].attention.n_embd if by_width else 1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.kind == "heads in a hook":
            with torch.no_grad():
                self.head.weight.mul_(self.layers[0].attention.n_head / 3)


class SizedNet(nn.Module):
    """A model whose own code is an attention, in a method that its forward calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.c_attn, self.c_proj, self.n_head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), HEADS

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        batch, length = tokens.shape
        q, k, v = (y.reshape(batch, length, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.c_proj(y)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(tokens))


class CallsMethods(LightningModule):
    """Its step calls methods of the model, or the forward of such a model that is the LightningModule itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = SizedNet(), kind

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        net = self if isinstance(self, SizedNet) else self.net
        logits = net.forward(batch[:, :-1]) if self.kind == "forward" else net.head(net.encode(batch[:, :-1]))
        logits = logits / net.n_head if self.kind == "heads" else logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class CallsOwnMethods(CallsMethods, SizedNet):
    """The same, where the LightningModule is the model."""

    def __init__(self, kind: str) -> None:
        LightningModule.__init__(self)
        SizedNet.__init__(self)
        self.kind = kind

    def forward(self, tokens: Tensor) -> Tensor:
        return SizedNet.forward(self, tokens)


def fit_methods(info: RankInfo, kind: str, own: bool, options: dict[str, Any] | None) -> tuple[float, list[str]]:
    """Loss and the styles of the layers after three steps."""
    tokens = torch.randint(0, VOCABULARY, (12, 17), generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(info, "auto" if options is None else MegatronStrategy(**options), max_steps=3)
    trainer.fit(CallsOwnMethods(kind) if own else CallsMethods(kind), DataLoader(tokens, batch_size=4))
    rows = [] if options is None else trainer.strategy.parallel_report.rows
    return float(trainer.callback_metrics["train_loss"]), [row.style for row in rows]


class InlineLayer(nn.Module):
    """A layer that computes its attention itself, by sizes of its input, of the model, or of a constant.

    Args:
        kind: how it views the heads.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.c_proj, self.kind, self.n_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), kind, HEADS
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        if kind in ("split", "unbound"):
            self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            keys = WIDTH // 2 if kind == "groups" else WIDTH
            self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, keys), nn.Linear(WIDTH, keys)
        self.register_buffer("mask", torch.ones(32, 32).tril()[None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm(x)
        mixed = getattr(self, f"_{self.kind}")(y, batch, length, width)
        x = x + self.c_proj(mixed)
        return x + self.mlp(x)

    def _split(self, y: Tensor, batch: int, length: int, width: int) -> Tensor:
        q, k, v = self.c_attn(y).split(width, dim=2)
        q, k, v = (z.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for z in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(batch, length, width)

    def _unbound(self, y: Tensor, batch: int, length: int, width: int) -> Tensor:
        q, k, v = self.c_attn(y).reshape(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(y.shape)

    def _merged(self, y: Tensor, batch: int, length: int, width: int) -> Tensor:
        def heads(z: Tensor) -> Tensor:
            return z.view(batch, length, HEADS, -1).transpose(1, 2).reshape(batch * HEADS, length, width // HEADS)

        q, k, v = heads(self.query(y)), heads(self.key(y)), heads(self.value(y))
        mixed = torch.bmm((torch.bmm(q, k.transpose(1, 2)) / math.sqrt(width)).softmax(-1), v)
        return mixed.view(batch, HEADS, length, -1).transpose(1, 2).reshape(batch, length, width)

    def _groups(self, y: Tensor, batch: int, length: int, width: int) -> Tensor:
        groups, size = HEADS // 2, width // HEADS
        q = self.query(y).view(batch, length, HEADS, size).transpose(1, 2)
        k, v = (z.view(batch, length, groups, size).transpose(1, 2) for z in (self.key(y), self.value(y)))
        k = k[:, :, None].expand(batch, groups, 2, length, size).reshape(batch, HEADS, length, size)
        mixed = F.scaled_dot_product_attention(q, k, v.repeat_interleave(2, dim=1), is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)


class Inline(Sized):
    """Two such layers.

    Args:
        kind: how they view the heads.
    """

    def __init__(self, kind: str) -> None:
        super().__init__("")
        self.layers = nn.ModuleList([InlineLayer(kind) for _ in range(2)])


def fit_sized(
    info: RankInfo, kind: str, options: dict[str, Any] | None, inline: bool = False
) -> tuple[float, dict[str, Tensor], list[str]]:
    """Loss, whole weights and the styles of the layers after three steps."""
    tokens = torch.randint(0, VOCABULARY, (12, 17), generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(info, "auto" if options is None else MegatronStrategy(**options), max_steps=3)
    module = Inline(kind) if inline else Sized(kind)
    trainer.fit(module, DataLoader(tokens, batch_size=4))
    loss = float(trainer.callback_metrics["train_loss"])
    if options is None:
        return loss, {name: value.clone() for name, value in module.state_dict().items()}, []
    styles = [
        row.style
        for row in trainer.strategy.parallel_report.rows
        if row.name.startswith("layers.0.") and "mlp" not in row.name
    ]
    return loss, {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}, styles
