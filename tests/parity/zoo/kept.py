"""What layers leave behind besides their output: losses on themselves, in lists, in arguments; numbers; hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.zoo.blocks import HIDDEN, Block
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask

REGISTRY: list[Tensor] = []
"""Balancing losses of the step that runs, as modules outside of torch keep them."""


class Router(nn.Module):
    """Keeps its balancing loss, and how much of it there was, on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4)
        self.aux: Tensor | None = None
        self.load = 0.0

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        self.aux = shares.log().square().mean()
        self.load = float(shares.detach().amax(-1).mean())
        return shares


class RoutedBlock(Block):
    """A router inside of the layer weighs its output."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    @property
    def balance(self) -> Tensor:
        assert self.router.aux is not None
        return 2 * self.router.aux

    def forward(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:  # type: ignore[override]
        out = super().forward(x) * self.router(x).amax(-1, keepdim=True)
        if seen is not None:
            seen.append(self.balance)
        return out


class ListedBlock(RoutedBlock):
    """Tells a list outside of all modules."""

    def forward(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        out = super().forward(x)
        REGISTRY.append(self.balance)
        return out


class Routed(Walker):
    """A stack of routed layers."""

    def __init__(self, block: type[RoutedBlock] = RoutedBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(4)])


class KeptInLayers(TokenTask):
    """Adds what every router kept, asks a property of each layer, and takes it off again."""

    def __init__(self) -> None:
        super().__init__(Routed())

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch) + 0.05 * torch.stack([block.balance for block in self.net.blocks]).sum()
        for module in self.modules():
            if isinstance(module, Router) and module.aux is not None:
                loss = loss + 0.1 * module.aux
                module.aux = None
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        self.log("load", torch.tensor([block.router.load for block in self.net.blocks]).mean(), sync_dist=True)
        return loss


class KeptInRegistry(TokenTask):
    """Sums what layers told a list of the Python module."""

    def __init__(self) -> None:
        super().__init__(Routed(ListedBlock))

    def loss(self, batch: Any) -> Tensor:
        REGISTRY.clear()
        return super().loss(batch) + 0.1 * sum(REGISTRY, torch.zeros(()))


class Noting(Walker):
    """Hands the layers a list to note their losses in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([RoutedBlock() for _ in range(4)])

    def forward(self, tokens: Tensor) -> Any:
        seen: list[Tensor] = []
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, seen)
        return self.head(x), torch.stack(seen).mean()


class KeptInArgument(TokenTask):
    """Adds the losses that the layers noted in their argument."""

    def __init__(self) -> None:
        super().__init__(Noting())

    def loss(self, batch: Any) -> Tensor:
        logits, balance = self.net(batch[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) + 0.1 * balance

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])[0]


class Adder(Block):
    """Adds to what the step has left of its sums, tells a dataclass and a buffer, and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Any = 0.0
        self.report: Report | None = None
        self.register_buffer("spread", torch.zeros(()), persistent=False)
        self.task: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out = super().forward(x)
        self.total = self.total + out.square().mean()
        self.report = Report(out.abs().mean())
        self.spread = (out - x).square().mean()
        self.task[0].log("seen", out.detach().mean(), sync_dist=True)
        return out


@dataclass
class Report:
    """What an adder says of a micro-batch."""

    size: Tensor


class KeptSums(TokenTask):
    """Takes the sums of its layers and sets them back behind the layers."""

    own_of_replicas = r"`net\.blocks\.\d\.(spread|total)`, .* and \d others"

    def __init__(self) -> None:
        super().__init__(Walker())
        self.net.blocks = nn.ModuleList([Adder() for _ in range(4)])
        self.sizes: dict[nn.Module, Tensor] = {}
        for block in self.net.blocks:
            block.task.append(self)
            block.register_forward_hook(lambda layer, _, out: self.sizes.__setitem__(layer, out.square().mean()))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch) + 0.1 * sum(self.sizes.values())
        for block in self.net.blocks:
            loss = loss + 0.1 * block.total + 0.05 * block.report.size + 0.1 * block.spread
            block.total = 0.0
        return loss


class Hooked(TokenTask):
    """Hooks of every kind on every layer: outputs scaled, inputs shifted, gradients scaled, sizes kept for the loss."""

    own_of_replicas = "`sizes.0`, `sizes.1`, `sizes.2`, `sizes.3`"

    def __init__(self) -> None:
        super().__init__(Walker())
        self.sizes: dict[int, Tensor] = {}
        for index, block in enumerate(self.net.blocks):
            block.register_forward_pre_hook(lambda _, args: (args[0] + 0.1, *args[1:]))
            block.register_forward_hook(lambda _, args, out: 0.9 * out)
            block.register_forward_hook(lambda _, args, out, i=index: self.sizes.__setitem__(i, out.square().mean()))
            block.register_full_backward_hook(lambda _, into, out: tuple(g if g is None else 0.9 * g for g in into))
            block.register_full_backward_pre_hook(lambda _, out: (0.8 * out[0],))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + 0.05 * torch.stack(list(self.sizes.values())).sum()


class ShorteningBlock(Block):
    """Keeps every ``stride``-th position; only this number, no weight's shape, tells one from the next."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[:, :: self.stride]


class Shortened(TokenTask):
    """Its second layer halves the sequence; the loss is weighted by the lengths that the layers returned."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.net.blocks = nn.ModuleList([ShorteningBlock(stride) for stride in (1, 2, 1, 1)])

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        x, length = self.net.embed(tokens), 0
        for block in self.net.blocks:
            x = block(x)
            length += x.size(1)
        logits = self.net.head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets[:, ::2].flatten()) * length / 16
