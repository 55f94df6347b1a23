"""Modules that their author has compiled, in whole or in part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trainer_for
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.loops import Walker
from tests.parity.zoo.tasks import TokenTask

BACKEND = "eager"  # traced, and run as it was


class Body(Walker):
    """The layers as one compiled module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(nn.Sequential(*self.blocks), backend=BACKEND)
        del self.blocks

    def walk(self, x: Tensor) -> Tensor:
        return self.body(x)


def _wrapped() -> TokenTask:
    return TokenTask(torch.compile(LearnedPositions(), backend=BACKEND))  # type: ignore[arg-type]


def _in_place() -> TokenTask:
    task = TokenTask(LearnedPositions())
    task.net.compile(backend=BACKEND)
    return task


def _parts() -> TokenTask:
    task = TokenTask(Walker())
    task.net.blocks = nn.ModuleList([torch.compile(block, backend=BACKEND) for block in task.net.blocks])  # type: ignore[misc]
    task.net.head.compile(backend=BACKEND)
    task.net.embed.compile(backend=BACKEND)
    return task


def _layers_in_place() -> TokenTask:
    task = TokenTask(Walker())
    for block in task.net.blocks:
        block.compile(backend=BACKEND)
    return task


class Quiet(TokenTask):
    """Logs nothing: torch cannot compile Lightning's ``log``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def _whole() -> Any:
    return torch.compile(Quiet(LearnedPositions()), backend=BACKEND)


def _scripted() -> TokenTask:
    task = TokenTask(Walker())
    layers = [nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(4)]
    task.net.blocks = nn.ModuleList([torch.jit.script(layer) for layer in layers])
    return task


MODULES: dict[str, Callable[[], Any]] = {
    "wrapped": _wrapped,
    "wrapped_body": lambda: TokenTask(Body()),
    "in_place": _in_place,
    "parts": _parts,
    "layers_in_place": _layers_in_place,
    "whole": _whole,
    "scripted": _scripted,
}


class Losses(Callback):
    """The loss of every batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))


def fit(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], name: str) -> Any:
    """Losses of a short training, and whether anything was compiled."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(7)
    losses = Losses()
    trainer_for(info, layout, arguments, max_epochs=2, callbacks=[losses]).fit(MODULES[name]())
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return losses.values, graphs > 0
