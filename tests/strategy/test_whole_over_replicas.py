"""Steps whose batches stay whole count over replicas what their losses are means of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import RankInfo, run_trainers
from tests.parity.scenario import Layout, count_as_one_process, trainer_for
from tests.strategy.loss_modules import LENGTH, InBatch, Late, Logs, Sum, Task

WIDE = pytest.mark.wide


class Keeps(Task):
    """Keeps what it has made of the batch; whatever else is the same for all micro-batches, the batch stays whole."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Any:
        self.kept = self(batch[0]).detach()
        return super().training_step(batch, batch_idx)


class Stops(Task):
    """May end the run in a step."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Any:
        output = super().training_step(batch, batch_idx)
        if output["loss"].item() < 0:
            self.trainer.should_stop = True
        return output


class Twice(Task):
    """Calls the layers twice, and takes a gradient itself."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        (slope,) = torch.autograd.grad(0.01 * logits.square().sum(), logits, retain_graph=True)
        other = super().loss(x.flip(1), y)
        kept = y != -100
        return 0.5 * other + 0.5 * torch.nn.functional.cross_entropy(logits[kept] - slope[kept], y[kept])


class Carries(Task):
    """A sample goes on from what the one in its place has left in the step before."""

    left: Tensor | None = None

    def each(self, x: Tensor, y: Tensor, **options: Any) -> Tensor:
        logits = self(x) if self.left is None else self(x) + 0.5 * self.earlier(self.left)
        self.left = self.forwarded(logits.detach())
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), **options)

    def forwarded(self, logits: Tensor) -> Tensor:
        """What is left for the next step."""
        return logits

    def earlier(self, left: Tensor) -> Tensor:
        """What is made of it."""
        return left


class CarriesTokens(Carries):
    """As rows of tokens, one sample behind the other."""

    def forwarded(self, logits: Tensor) -> Tensor:
        return logits.flatten(0, 1)

    def earlier(self, left: Tensor) -> Tensor:
        return left.view(-1, LENGTH, left.shape[-1])


class Averages(Carries):
    """Every sample goes on from what all have left."""

    def earlier(self, left: Tensor) -> Tensor:
        return left.mean(0)


class LateKeeps(Keeps, Late):
    """Nothing is ignored in the first batch."""


class SumStops(Stops, Sum):
    """A sum."""


class TwiceStops(Stops):
    """Calls the layers twice."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * self.each(x, y) + 0.5 * self.each(x.flip(1), y)


class LogsKept(Keeps, Logs):
    """Logs functions of means."""


MODULES: dict[str, type[Task]] = {
    **{kind.__name__: kind for kind in (Keeps, Stops, Twice, LateKeeps, SumStops, TwiceStops, LogsKept)},
    **{kind.__name__: kind for kind in (Carries, CarriesTokens, Averages)},
    **{kind.__name__: kind for kind in (Task, Late, Sum, InBatch)},
}


def trained(info: RankInfo, layout: Layout | None, name: str, arguments: Mapping[str, Any]) -> Any:
    """Logged values and weights of a run."""
    torch.manual_seed(0)
    trainer = trainer_for(info, layout, arguments, max_epochs=1)
    module = MODULES[name]()
    trainer.fit(module)
    weights = module.state_dict() if layout is None else trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"logged": logged, "weights": {key: value.clone() for key, value in weights.items()}}


CUT: dict[str, Any] = {"micro_batch_size": 2}
WHOLE: dict[str, Any] = {**CUT, "whole_batch_loss": True}
ROWS = [
    pytest.param(name, layout, arguments, marks=() if (name, layout, arguments) in EVERYDAY else WIDE)
    for EVERYDAY in [
        [
            *(("Keeps", (1, 2), CUT), ("Stops", (2, 2), CUT), ("Twice", (2, 2), CUT), ("Task", (2, 2), WHOLE)),
            ("Carries", (1, 2), CUT),
        ]
    ]
    for names, layouts in (
        (
            ("Keeps", "Stops", "Twice", "LateKeeps", "SumStops", "TwiceStops", "LogsKept"),
            (
                ((1, 2), CUT),
                ((2, 2), CUT),
                ((2, 2), {}),
                ((2, 2), {**CUT, "pipeline_schedule": "zb-v"}),
                ((2, 1), CUT),
            ),
        ),
        (
            ("Carries", "CarriesTokens"),
            (((1, 2), CUT), ((1, 2), {}), ((1, 4), {}), ((1, 8), {"micro_batch_size": 1}), ((2, 2), CUT)),
        ),
        (("Task", "Late", "Sum"), (((1, 2), WHOLE), ((2, 2), WHOLE), ((1, 2), {"whole_batch_loss": True}))),
    )
    for name in names
    for layout, arguments in layouts
]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("name", "layout", "arguments"), ROWS, ids=str)
def test_whole_batches_of_replicas_count_as_in_one_process(
    name: str, layout: Layout, arguments: Mapping[str, Any]
) -> None:
    count_as_one_process(trained, name, layout, arguments)


@pytest.mark.parametrize("layout", [pytest.param((1, 2), id="dp2"), pytest.param((2, 2), id="pp2xdp2", marks=WIDE)])
def test_a_loss_of_each_replicas_whole_batch_is_said(layout: Layout) -> None:
    """Also where the user has said that it is one of the whole batch: one process has that of all replicas."""
    found = run_trainers(trained, layout, "InBatch", WHOLE, devices=layout[0] * layout[1], check=False, grace=20.0)
    said = r"two parts of a batch at once, .* it depends on which samples it sees together. Each of the 2 replicas"
    assert re.search(said, f"{found[0].error}{found[0].output}"), found[0].error


@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        ((1, 2), CUT),
        pytest.param((1, 2), {}, marks=WIDE),
        pytest.param((1, 8), {"micro_batch_size": 1}, marks=WIDE),
        pytest.param((2, 2), CUT, marks=WIDE),
    ],
    ids=str,
)
def test_a_step_that_averages_what_a_replicas_samples_have_left_is_said(
    layout: Layout, arguments: Mapping[str, Any]
) -> None:
    """The second step is tried with the values of the samples of each part."""
    devices = layout[0] * layout[1]
    found = run_trainers(trained, layout, "Averages", arguments, devices=devices, check=False, grace=20.0)
    said = r"two parts of a batch at once, .* it depends on which samples it sees together. Each of the \d replicas"
    assert re.search(said, f"{found[0].error}{found[0].output}"), found[0].error
