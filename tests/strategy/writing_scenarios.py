"""Modules whose steps write Python state and read what earlier steps have written."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from tests.harness import RankInfo
from tests.parity.scenario import Layout, trained_state
from tests.parity.zoo.blocks import HIDDEN
from tests.parity.zoo.data import VOCABULARY
from tests.parity.zoo.tasks import TokenTask
from tests.pipeline.buffer_scenarios import Block

CALLS = {"steps": 0}
HITS = {"hits": 6, "hits_of_all": 24}
"""Tokens that one micro-batch of the first batch of four has, and several of the next; and that all have, and some."""


class Counting(nn.Module):
    """Scales by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen.append(self.calls)
        return x * (1 + 0.01 * self.calls)


class Net(nn.Module):
    """Layers, with a module between some of them."""

    def __init__(self, *places: int, masks: bool = False) -> None:
        super().__init__()
        self.places, self.masks = places, masks
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.between = Counting()
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.register_buffer("mask", torch.ones(VOCABULARY, HIDDEN))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.masks and self.training:
            with torch.no_grad():
                self.mask.copy_(self.embed.weight.abs() > 0.1)
        x = functional.embedding(tokens, self.embed.weight * self.mask)
        for place, layer in enumerate(self.layers):
            x = layer(self.between(x) if place in self.places else x)
        return self.head(x)


class Slotted:
    """Has no dictionary."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


class Schedule:
    """Falls with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1 / self.calls


def _ticks() -> Callable[[], int]:
    count = 0

    def tick() -> int:
        nonlocal count
        count += 1
        return count

    return tick


class Writes(TokenTask):
    """The factor of its loss is of what earlier steps wrote."""

    steps: ClassVar[int] = 0

    def __init__(self, kind: str) -> None:
        places = {"between": (2,), "everywhere": (0, 1, 2, 3), "whole_between": (2,)}.get(kind, ())
        super().__init__(Net(*places, masks=kind == "mask"))
        self.kind = kind
        self.losses, self.recent, self.kept = list[float](), deque[float](maxlen=3), list[Tensor]()
        self.seen, self.named = 0, {"steps": 0}
        self.schedule, self.tick, self.random = Schedule(), _ticks(), random.Random(3)
        self.array, self.torch = np.random.default_rng(5), torch.Generator().manual_seed(4)
        self.places: Iterator[int] = itertools.count()
        self.factors: Iterator[float] = (1 / k for k in range(1, 10**6))
        self.slotted, self.rebound, self.found = Slotted(), list[float](), defaultdict[str, list[float]](list)
        self.level, self.first = 1, 0.0
        self.entries: list[dict[str, Any]] = []
        self.latest, self.last = torch.ones(VOCABULARY, dtype=torch.float64), [1.0] * VOCABULARY
        self.register_buffer("rows", torch.zeros(()))
        CALLS["steps"], Writes.steps = 0, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kind == "per_sample":
            rows = torch.rand(len(batch[0]), generator=self.torch, dtype=torch.float64)
            logits = self.net(batch[0])
            each = functional.cross_entropy(logits.transpose(1, 2), batch[1], reduction="none").mean(1)
            return (each * rows).mean()
        if self.kind in ("elements", "entries"):
            return self._by_index(*batch)
        loss = super().training_step(batch, batch_idx)
        if self.kind.startswith("whole"):
            return loss.sqrt() / self.tick()
        factor = 1.0 + sum(self.losses[-2:]) + sum(self.recent) + self.seen / 50 + float(self.rows) / 40
        if self.kind == "lists":
            self.losses.append(float(loss.detach()))
            self.recent.append(2 * float(loss.detach()))
            self.kept.append(loss.detach())
        elif self.kind == "sums":
            self.seen += len(batch[0])
            self.rows += len(batch[0])
        elif self.kind == "assigned":
            self.seen = len(batch[0]) + batch_idx
        elif self.kind == "globals":
            CALLS["steps"] += 1
            Writes.steps += 1
            self.named["steps"] += 1
            factor = CALLS["steps"] + Writes.steps + self.named["steps"]
        elif self.kind == "objects":
            factor = 1 / (self.schedule() + self.tick())
        elif self.kind == "generators":
            factor = 0.5 + self.random.random() + self.array.random() + float(torch.rand((), generator=self.torch))
        elif self.kind == "iterators":
            factor = (1 + next(self.places)) / next(self.factors)
        elif self.kind == "undetached":
            self.entries.append({"loss": loss, "rows": len(batch[0])})
        elif self.kind == "slots":
            self.slotted.steps += 1
            factor = self.slotted.steps
        elif self.kind == "rebound":
            factor = 1 + sum(self.rebound) + sum(self.found["losses"])
            self.rebound = [*self.rebound, float(loss.detach())]
            self.found["losses"].append(float(loss.detach()))
        elif self.kind == "later":
            self.seen += 1
            self.level = min(2 * self.level, 16) if self.seen == 2 else self.level
            factor = self.level
        elif self.kind in HITS:
            self.seen += bool((batch[0] - HITS[self.kind] == 0).any())
        elif self.kind == "later_unlike":
            self.seen += 1
            self.first = float(loss.detach()) if self.seen == 2 else self.first
        return loss / factor

    def _by_index(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Weighs samples by their losses when they were seen last; one may come twice in a batch."""
        each = functional.cross_entropy(self.net(tokens).transpose(1, 2), targets, reduction="none").mean(1)
        places, before = tokens[:, 0] % 23, self.latest if self.kind == "elements" else torch.tensor(self.last)
        loss = (each * before.to(each)[places]).mean()
        if self.kind == "elements":
            self.latest[places] = each.detach().double()
        else:
            for place, value in zip(places.tolist(), each.tolist(), strict=True):
                self.last[place] = value
        return loss


KINDS = (
    *("elements", "entries", "hits"),
    *("lists", "sums", "assigned", "globals", "objects", "generators", "iterators", "per_sample", "mask"),
    *("between", "everywhere", "whole", "whole_between", "slots", "rebound", "later", "undetached"),
)


def train(info: RankInfo, layout: Layout | None, arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Trains; the whole state, and the Python state that hooks see."""
    torch.manual_seed(7)
    module = Writes(kind).double()
    found = trained_state(info, layout, arguments, module, max_epochs=2)
    return found | {f"python.{name}": torch.tensor(value) for name, value in _python(module).items()}


def _python(module: LightningModule) -> dict[str, Any]:
    assert isinstance(module, Writes)
    between = module.net.between
    return {
        "losses": module.losses,
        "recent": list(module.recent),
        "kept": [float(value) for value in module.kept],
        "counts": [module.seen, module.named["steps"], CALLS["steps"], Writes.steps, module.schedule.calls],
        "drawn": [module.random.random(), module.array.random(), float(torch.rand((), generator=module.torch))],
        "iterated": [next(module.places), next(module.factors), module.tick()],
        "between": [between.calls, *between.seen],
        "entries": [float(torch.as_tensor(value).detach()) for entry in module.entries for value in entry.values()],
    }
