"""Steps that write weights themselves, and layers that remember: what one process does once per batch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.blocks import HIDDEN
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.tasks import TokenTask
from tests.pipeline.buffer_scenarios import Block

_ROWS = 16
"""Rows for each token, by its sample: no replica looks up all of them."""


class Shrinks(Block):
    """Shrinks its own weight before each use."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.9)
        return super().forward(x)


class Remembers(Block):
    """Adds what it was given for the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before, self.memory = self.memory, x.detach()
        fits = before is not None and before.shape == x.shape
        return super().forward(x + 0.1 * before if fits else x)


class RemembersMean(Remembers):
    """Adds their mean."""

    def forward(self, x: Tensor) -> Tensor:
        if self.memory is not None:
            x = x + 0.1 * self.memory
        self.memory = x.detach().mean((0, 1))
        return Block.forward(self, x)


LAYERS: dict[str, type[Block]] = {"layer": Shrinks, "memory": Remembers, "mean": RemembersMean}


class Net(nn.Module):
    """An embedding, layers and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(_ROWS * VOCABULARY, HIDDEN, max_norm=1.0 if kind in ("max_norm", "tied") else None)
        self.bag = nn.EmbeddingBag(_ROWS * VOCABULARY, HIDDEN, max_norm=0.7 if kind == "max_norm" else None)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        if kind in ("tied", "tied_data", "tied_late"):
            self.embed.weight = self.head.weight
        self.target = nn.Linear(HIDDEN, VOCABULARY).requires_grad_(False)
        self.layers = nn.ModuleList(LAYERS.get(kind, Block)() for _ in range(4))
        self.kind = kind
        self.before = nn.LSTM(HIDDEN, HIDDEN, batch_first=True) if kind == "carried" else None
        self.carried: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = (
            tokens
            if self.embed.weight is self.head.weight
            else tokens + VOCABULARY * (tokens.sum(1, keepdim=True) % _ROWS)
        )
        x = self.embed(tokens)
        if self.kind == "functional":
            x = functional.embedding(tokens, self.embed.weight, max_norm=1.0)
        if self.kind == "max_norm":
            x = x + self.bag(tokens)[:, None]
        if self.before is not None:
            fits = self.carried is not None and self.carried[0].shape[1] == len(x)
            x, carried = self.before(x, self.carried if fits else None)
            self.carried = tuple(state.detach() for state in carried)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) - 0.1 * self.target(x)


class Writes(TokenTask):
    """Writes weights in its step."""

    def __init__(self, kind: str) -> None:
        super().__init__(Net(kind))
        self.kind = kind

    def reaches(self, number: int, wanted: int) -> bool:
        return number == wanted

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        net: Any = self.net
        with torch.no_grad():
            if self.kind == "weights" or (self.kind == "late" and self.reaches(batch_idx, 2)):
                net.layers[1].up.weight.mul_(0.9)
                net.head.weight.clamp_(-0.2, 0.2)
            elif self.kind == "target":
                net.target.weight.mul_(0.9).add_(net.head.weight, alpha=0.1)
            elif self.kind == "init":
                nn.init.constant_(net.layers[1].up.weight[0], 0.1)
                nn.init.constant_(net.layers[1].up.weight.data[:, 1], 0.2)
                nn.init.zeros_(tensor=net.layers[2].up.bias.data)
                nn.init.eye_(net.head.weight[2:])
        if self.kind == "blend":
            for own, other in zip(net.target.parameters(), net.head.parameters(), strict=True):
                own.data = own.data * 0.9 + other.data * 0.1
        if self.kind == "late_data" and self.reaches(batch_idx, 1):
            net.layers[1].up.weight.data.mul_(0.9)
        elif self.kind == "late_set" and self.reaches(batch_idx, 1):
            net.head.weight.data = net.head.weight.data * 0.9
        elif self.kind == "set":
            net.layers[1].up.weight.data = net.layers[1].up.weight.data * 0.9
            net.head.weight.data = net.head.weight.data * 0.9
        elif self.kind == "data":
            net.layers[2].up.weight.data.mul_(0.9)
            net.embed.weight.detach()[1].zero_()
        elif self.kind == "of_layers":
            net.target.weight.data.add_(net.layers[0].up.weight.data.mean())
        loss: Tensor = super().training_step(batch, batch_idx)
        if self.kind == "behind":
            net.embed.weight.detach().mul_(0.99)
        elif self.kind == "tied_data" or (self.kind == "tied_late" and self.reaches(batch_idx, 2)):
            net.head.weight.data.mul_(0.9)
        return loss


class WritesUnread(Writes):
    """Decides when to write in a way that is not read in its code."""

    def reaches(self, number: int, wanted: int) -> bool:
        return {number} == {wanted}


def train(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Trains; the whole state."""
    torch.manual_seed(7)
    unread = kind.startswith("unread_")
    module = (WritesUnread if unread else Writes)(kind.removeprefix("unread_")).double()
    trainer = trainer_for(info, layout, arguments, max_epochs=1, limit_val_batches=1)
    trainer.fit(module)
    state = module.state_dict() if layout is None else trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    return {name: value.clone() for name, value in state.items()}


class Projects(TokenTask):
    """Projects the gradients of two losses on each other (PCGrad, arXiv 2001.06782) and updates by their sum.

    Args:
        kind: where they come from: "backward", "grad" (of this replica's samples), or "gathered" ones.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(Net(""))
        self.kind, self.automatic_optimization = kind, False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        parameters = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        logits = self.net(batch[0])
        losses = [functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()), logits.square().mean()]
        one, other = (self._gradients(optimizer, parameters, loss) for loss in losses)
        dot = sum((a * b).sum() for a, b in zip(one, other, strict=True))
        size = sum(b.square().sum() for b in other)
        for parameter, a, b in zip(parameters, one, other, strict=True):
            parameter.grad = a - dot / size * b + b
        optimizer.step()

    def _gradients(self, optimizer: Any, parameters: list[Any], loss: Tensor) -> list[Tensor]:
        if self.kind == "backward":
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        mine = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        if self.kind == "grad" or self.trainer.world_size == 1:
            return mine
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, about what Lightning calls
            return [self.all_gather(gradient).mean(0) for gradient in mine]


def project(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Trains by projected gradients; the whole state."""
    torch.manual_seed(7)
    module = Projects(kind).double()
    plain = {} if layout is None else {"micro_batch_size": "auto"}
    trainer = trainer_for(info, layout, plain | arguments, max_epochs=1, limit_val_batches=0)
    trainer.fit(module)
    state = module.state_dict() if layout is None else trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    return {name: value.clone() for name, value in state.items()}
