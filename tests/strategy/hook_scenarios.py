"""Hooks that read and write weights of single layers, whichever stage those are on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask


class Gardener(TokenTask):
    """Prunes, clamps and starts weights afresh in hooks, and logs what became of them."""

    def __init__(self) -> None:
        super().__init__(Walker())

    @property
    def _weights(self) -> list[Tensor]:
        return [block.get_submodule("ln_1").weight for block in self.net.blocks]  # type: ignore[misc, operator]

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        first, second, third, fourth = self._weights
        first.mul_(0.99)
        second.data.clamp_(-1.0, 1.0)
        third[0] = 0.5
        fourth.data = fourth.data + 0.01
        torch.nn.init.zeros_(self.net.head.bias)
        self.log("first", first.norm())
        self.log("embedding", self.net.embed.weight.detach().abs().max())

    def on_train_epoch_end(self) -> None:
        self.log_dict({f"norm/{name}": parameter.detach().norm() for name, parameter in self.named_parameters()})
        self.log("epochs", float(self.current_epoch))


class Observer(Callback):
    """Logs from outside of the module."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Gardener)
        pl_module.log_dict({f"spread/{index}": weight.std() for index, weight in enumerate(pl_module._weights)})


def tended(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> dict[str, float]:
    """Everything logged after two epochs."""
    torch.manual_seed(7)
    trainer = trainer_for(info, layout, arguments, max_epochs=2, callbacks=[Observer()])
    trainer.fit(Gardener())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class Reader(Gardener):
    """Uses another layer's weight, in a hook.

    Args:
        kind: how.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        first, *_, last = self._weights
        if self.kind == "number":
            float(first.norm())
            float(last.norm())
        elif self.kind == "copy":
            last.copy_(first)
        else:
            self.log("all", torch.stack([weight.norm() for weight in self._weights]).norm())


def read(info: RankInfo, layout: Layout, arguments: Mapping[str, Any], kind: str) -> None:
    torch.manual_seed(7)
    trainer_for(info, layout, arguments, max_epochs=1).fit(Reader(kind))


class Clipper(TokenTask):
    """Clips with torch's function, in a hook.

    Args:
        kind: what it gives the function.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(Walker())
        self.kind = kind

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip = torch.nn.utils.clip_grad_norm_
        if self.kind == "all":
            self.log("norm", clip(self.parameters(), 0.1))
        elif self.kind == "those of the network":
            clip([parameter for parameter in self.net.parameters() if parameter.requires_grad], 0.1)
        elif self.kind == "each layer":
            for part in (self.net.embed, *self.net.blocks, self.net.head):
                clip(list(part.parameters()), 0.02)
        elif self.kind == "each":
            for parameter in self.parameters():
                clip(parameter, 0.02)
        else:
            clip(self.net.blocks.parameters(), 0.1)


def clipped(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, float]:
    """What was logged in the end."""
    torch.manual_seed(7)
    trainer = trainer_for(info, layout, arguments, max_epochs=2)
    trainer.fit(Clipper(kind))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class ReadsLate(TokenTask):
    """Looks at gradients behind the update, in a function of its own."""

    def __init__(self) -> None:
        super().__init__(Walker())
        self.read: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.read.append(largest_gradients(self))


def largest_gradients(module: LightningModule) -> float:
    """Sum over parameters of the largest number in each gradient."""
    return sum(float(one.grad.abs().max()) for one in module.parameters() if one.grad is not None)


def read_late(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any]) -> dict[str, float]:
    """What the hook reads behind each of three updates."""
    torch.manual_seed(7)
    module = ReadsLate()
    trainer_for(info, layout, arguments, max_steps=3).fit(module)
    return {str(at): value for at, value in enumerate(module.read)}
