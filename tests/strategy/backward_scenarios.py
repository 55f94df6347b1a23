"""Modules with code that runs in backwards and mixes the samples of a batch, or does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trained_state
from tests.parity.zoo.blocks import HIDDEN
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.tasks import TokenTask
from tests.pipeline.buffer_scenarios import Block

NORMS: dict[str, float] = {}


def by_norm(gradient: Tensor) -> Tensor:
    """Divides by something of all samples."""
    return gradient / (1 + 50 * gradient.norm())


def by_constant(gradient: Tensor) -> Tensor:
    """Multiplies by a constant of the dtype that tensors have there; its rounding, enlarged, is what shows."""
    third = torch.full((HIDDEN,), 1 / 3)
    return gradient * (1 + 1e6 * (third.double() - 1 / 3))


class Normed(Function):
    """Mixes samples in its backward only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Nothing."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """See :func:`by_norm`."""
        return by_norm(gradients[0])


normed = Normed.apply
"""As many take it, once."""


class Reversed(Function):
    """Treats each sample by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Nothing."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """As domain-adversarial training does."""
        return -0.3 * gradients[0]


class Scaled(Function):
    """Multiplies its gradient by a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Nothing."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """See :func:`by_constant`."""
        return by_constant(gradients[0])


class Hooked(Block):
    """Normalises the gradient of what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        """As the block does."""
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(by_norm)
        return x


class Net(nn.Module):
    """Layers, with something in the backward of one of them, or behind them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.steps = kind, 0
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.norm = nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList([Hooked() if kind == "layer" and place == 1 else Block() for place in range(4)])
        self.seen, self.norms = 0.0, list[float]()
        if kind == "module_hook":
            self.norm.register_full_backward_hook(lambda module, gradients, _: tuple(map(by_norm, gradients)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of tokens [b, s]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            if self.kind == "between" and self.training:
                x.register_hook(lambda gradient: 1.3 * gradient)
            if self.kind == "constants":
                x = Scaled.apply(x)  # type: ignore[no-untyped-call]
                if self.training:
                    x.register_hook(by_constant)
        self.steps += self.training
        if self.training:
            x = self._behind(x)
        logits = self.head(self.norm(x))
        if self.kind == "logits" and self.training:
            logits.register_hook(lambda gradient: gradient * torch.linspace(0.1, 3, VOCABULARY, dtype=gradient.dtype))
        return logits

    def _behind(self, x: Tensor) -> Tensor:
        if self.kind in ("hook", "negatives", "twice") or (self.kind == "later" and self.steps > 2):
            x.register_hook(by_norm)
        elif self.kind == "centred":
            x.register_hook(lambda gradient: gradient - gradient.mean(0, keepdim=True))
        elif self.kind == "node":
            assert x.grad_fn is not None
            x.grad_fn.register_prehook(lambda gradients: tuple(map(by_norm, gradients)))
        elif self.kind == "function":
            x = Normed.apply(x)  # type: ignore[no-untyped-call]
        elif self.kind == "reversal":
            x = x + Reversed.apply(x).tanh()  # type: ignore[no-untyped-call]
        elif self.kind == "clamp":
            x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        elif self.kind == "keeps":
            x.retain_grad()
        elif self.kind == "watches":
            x.register_hook(self._watch)
        return x

    def _watch(self, gradient: Tensor) -> None:
        self.seen = float(gradient.norm())
        self.norms.append(self.seen)
        NORMS["last"] = self.seen


class Backwards(TokenTask):
    """Trains on losses that are means over samples, but for one."""

    def __init__(self, kind: str) -> None:
        super().__init__(Net(kind.removeprefix("weights_").removesuffix("_twice")))
        self.kind = kind

    def on_fit_start(self) -> None:
        """Hooks on weights, for kinds beside them: they run once, on the whole gradient."""
        if self.kind.startswith("weights_"):
            for weight in (self.net.head.weight, self.net.layers[1].up.weight):
                weight.register_hook(by_norm)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """As the task does."""
        if self.kind == "negatives":
            rows = functional.normalize(self.net(batch[0]).mean(1), dim=-1)
            return functional.cross_entropy(3 * rows @ rows.T, torch.arange(len(rows)))
        if self.kind in ("twice", "constants_twice"):
            once, again = self.net(batch[0]), self.net(batch[0])
            return functional.cross_entropy((once + 1.1 * again).flatten(0, 1), batch[1].flatten())
        loss = super().training_step(batch, batch_idx)
        return loss / (1 + self.net.seen + sum(self.net.norms)) if self.kind == "watches" else loss


class Bare(TokenTask):
    """Has nothing that is known by its name to run in a backward."""

    def __init__(self) -> None:
        super().__init__(BareNet())


class BareNet(nn.Module):
    """Layers, and a function behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of tokens [b, s]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(normed(x))  # type: ignore[no-untyped-call]


KINDS = (
    "hook",
    "layer",
    "module_hook",
    "node",
    "function",
    "taken",
    "centred",
    "negatives",
    "watches",
    "reversal",
    "clamp",
    "between",
    "logits",
    "twice",
    "weights_reversal",
    "weights_hook",
    "constants",
    "constants_twice",
)


def train(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Trains; the whole state, and what backwards wrote, as hooks see it; and how often a step ran the layers."""
    torch.manual_seed(7)
    NORMS.clear()
    module = (Bare() if kind == "taken" else Backwards(kind)).double()
    found = trained_state(info, layout, arguments, module, max_epochs=2)
    if kind == "taken":
        return found
    return found | {f"python.{name}": torch.tensor(value) for name, value in _python(module).items()}


def _python(module: LightningModule) -> dict[str, Any]:
    net = module.net
    assert isinstance(net, Net)
    return {"seen": net.seen, "norms": net.norms, "global": NORMS.get("last", 0.0)}
