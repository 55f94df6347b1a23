"""Losses that bend at a number of the batch, on one side of which all micro-batches of the first steps lie."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trained_state
from tests.strategy.loss_modules import CUTS, Task

WIDE = pytest.mark.wide


class Flooded(Task):
    """The loss is kept from falling below what the mean of later batches lies above."""

    level = 2.75
    padded_from = 24

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (super().loss(x, y) - self.level).abs() + self.level

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class FreeBits(Flooded):
    """A penalty that begins somewhere."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + logits.square().mean().clamp(min=0.25)


class Decided(Flooded):
    """By the loss."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.each(x, y)
        return loss if loss > 2.75 else 0.5 * loss


class ByAccuracy(Flooded):
    """By how many are right: none of the first ones."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        right = (logits.argmax(-1) == y).double().mean()
        return (1.0 if right > 0.12 else 0.5) * F.cross_entropy(logits.flatten(0, 1), y.flatten())


class ByMean(Flooded):
    """The distance of means over the batch from others."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        means = logits.mean((0, 1))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + F.l1_loss(means, torch.full_like(means, 0.9))


class Smallest(Flooded):
    """The smaller one of two losses."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        return torch.minimum(F.cross_entropy(logits.flatten(0, 1), y.flatten()), 25 * logits.square().mean())


class Early(Flooded):
    """A penalty of what comes before the layers, on another stage than the loss."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        penalty = (h.square().mean() - 0.65).clamp(min=0)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten()) + 9 * penalty


class Kept(Flooded):
    """The first layer keeps one, on another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Penalised, self.layers))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.each(x, y)
        penalty: Tensor = self.layers[0].penalty  # type: ignore[assignment]
        return loss + 9 * penalty


class Penalised(nn.Module):
    """A layer with a penalty of its output, from some size on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.penalty = layer, torch.zeros((), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.penalty = F.relu(x.square().mean() - 0.1)
        return x


class BySample(Flooded):
    """Corners, each at a number of a sample, a token or a weight; and a condition on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)
        rows = torch.stack([row.clamp(max=3) for row in each])
        if bool((y > -1).all()) and (y != -100).sum() > 0:
            rows = rows + F.relu(logits.mean((1, 2)) + 0.01)
        weights = self.head.weight.abs().mean() + self.head.bias.mean().clamp(min=0.01)
        weights = weights + self.gate if self.gate < 0.5 else weights
        return rows.mean() + F.l1_loss(logits, torch.zeros_like(logits)) + 0.01 * weights


EVERY = {("Decided", 0), ("Early", 0), ("BySample", 0)}
KINDS = {
    kind.__name__: kind for kind in (Flooded, FreeBits, Decided, ByAccuracy, ByMean, Smallest, Early, Kept, BySample)
}


def train(info: RankInfo, layout: Layout | None, kind: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after two epochs."""
    return trained_state(info, layout, arguments, KINDS[kind](), max_epochs=6)


@pytest.mark.parametrize(
    ("kind", "layout", "arguments"),
    [
        pytest.param(kind, layout, arguments, marks=() if (kind, at) in EVERY else WIDE)
        for kind in KINDS
        for at, (layout, arguments) in enumerate(CUTS)
    ],
    ids=str,
)
def test_weights_are_those_of_one_process(kind: str, layout: Layout, arguments: dict[str, Any]) -> None:
    expected = one_process(train, None, kind, {})
    first = run_trainers(train, layout, kind, arguments, devices=layout[0] * layout[1])[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output
    assert ("at a number of the batch" in first.output.replace("by a", "at a")) == (kind != "BySample"), first.output


@pytest.mark.parametrize("kind", ["FreeBits", pytest.param("BySample", marks=WIDE)])
def test_replicas_are_told(kind: str) -> None:
    outcomes = run_trainers(train, (1, 2), kind, {}, devices=2, check=False)
    said = re.sub(r"\s+", " ", "".join(f"{outcome.error}\n{outcome.output}" for outcome in outcomes))
    assert ("bends at a number of the batch (`clamp` in " in said) == (kind == "FreeBits"), said
