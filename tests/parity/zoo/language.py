"""Token networks: `forward(tokens)` gives logits ``[batch, seq, VOCABULARY]`` unless it says otherwise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parity.zoo.blocks import HEADS, HIDDEN, Bare, Block, TupleBlock
from tests.parity.zoo.data import LENGTH, VOCABULARY


class NanoGPT(nn.Module):
    """A dictionary of parts with the list ``h`` among them, head tied to the embedding, returns logits and loss."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, HIDDEN),
                "wpe": nn.Embedding(LENGTH, HIDDEN),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([Block() for _ in range(layers)]),
                "ln_f": nn.LayerNorm(HIDDEN),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.transformer.drop(self.transformer.wte(tokens) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


class KeywordHidden(nn.Module):
    """The hidden state is passed by keyword, beside a mask."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(mask=padding, hidden_states=hidden)
        return self.head(hidden)


class SequentialTrunk(nn.Module):
    """The trunk is an ``nn.Sequential`` that is called as one, between a small stem and a head."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), nn.LayerNorm(HIDDEN))
        self.trunk = nn.Sequential(*[Block() for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.trunk(self.stem(tokens)))


class OneSequential(nn.Module):
    """Embedding, layers and head are one ``nn.Sequential``."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        ends = [nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)]
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), *[Block() for _ in range(layers)], *ends)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


class TorchLayers(nn.Module):
    """A list of torch's own encoder layers with a causal mask and a key padding mask."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([_encoder_layer() for _ in range(layers)])
        self.out = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.embed(tokens)
        causal = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=causal, src_key_padding_mask=~padding)
        return self.out(x)


class TorchEncoder(nn.Module):
    """torch's ``nn.TransformerEncoder``, which looks at its first layer before it calls it."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.encoder = nn.TransformerEncoder(
            _encoder_layer(), layers, norm=nn.LayerNorm(HIDDEN), enable_nested_tensor=False
        )
        self.out = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), dtype=self.out.weight.dtype)
        return self.out(self.encoder(self.embed(tokens), mask=mask, is_causal=True))


class TupleLayers(nn.Module):
    """Layers return tuples, and the loop unpacks them."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([TupleBlock() for _ in range(layers)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x, extra = layer(x)
            assert set(extra) == {"norm"}, index
        return self.head(x)


class Recurrent(nn.Module):
    """Stacked GRU layers, each returning its output and its state; the network keeps the output."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([nn.GRU(HIDDEN, HIDDEN, batch_first=True) for _ in range(layers)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class LearnedPositions(nn.Module):
    """Positions are a bare parameter, the final norm is registered before the layers, the head is a functional call."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.final_norm = nn.LayerNorm(HIDDEN)
        self.positions = nn.Parameter(torch.randn(1, LENGTH, HIDDEN) * 0.1)
        self.token_embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) * HIDDEN**0.5 + self.positions[:, : tokens.size(1)]
        for layer in self.layers[: len(self.layers)]:
            x = layer(x)
        return F.linear(self.final_norm(x), self.token_embedding.weight)


class ParallelLists(nn.Module):
    """Layers and norms in two lists that are walked together; ``outside`` keeps the residual out of the layers."""

    def __init__(self, layers: int = 4, outside: bool = False) -> None:
        super().__init__()
        self.outside = outside
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN) for _ in range(layers)])
        self.layers = nn.ModuleList([Bare() for _ in range(layers)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x)) if self.outside else norm(layer(x))
        return self.head(x)


class RelativeBias(nn.Module):
    """A learned bias, computed once, goes into every layer: its gradient comes from every stage."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.relative = nn.Embedding(2 * LENGTH - 1, HEADS)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        bias = self.relative(positions[None] - positions[:, None] + LENGTH - 1).permute(2, 0, 1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, bias=bias)
        return self.head(x)


class Checkpointed(nn.Module):
    """Each layer is recomputed in backward; the embedding is frozen."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN).requires_grad_(False)
        self.adapter = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.adapter(self.embed(tokens))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class TwoHeads(nn.Module):
    """Three inputs, two outputs: logits per token and per sequence."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(6, HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.tokens, self.classes = nn.Linear(HIDDEN, VOCABULARY), nn.Linear(HIDDEN, 5)

    def forward(self, ids: Tensor, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids) + self.project(features)
        for layer in self.layers:
            x = layer(x, mask)
        pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.tokens(x), self.classes(pooled)


def _encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(HIDDEN, HEADS, 2 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
