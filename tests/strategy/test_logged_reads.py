"""Steps that read the Trainer's metrics, in which each finds what it finds in one process, or is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import RankInfo, one_process, run_trainers
from tests.parity.scenario import Layout, differences, trained_state
from tests.strategy.loss_modules import Task

WIDE = pytest.mark.wide
LAYOUTS: list[Any] = [
    ((1, 1), {"micro_batch_size": 2}),
    pytest.param((2, 1), {}, marks=WIDE),
    pytest.param((1, 2), {}, marks=WIDE),
    pytest.param((2, 2), {"pipeline_schedule": "zb-v"}, marks=WIDE),
]


class ReadsEarlier(Task):
    """Weighs a batch by the loss of the one before, and reads what nobody has logged."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        metrics = self.trainer.callback_metrics  # type: ignore[union-attr]
        earlier = float(metrics.get("weighed", torch.tensor(1.0)))
        loss = self.each(x, y)
        self.log("weighed", loss.detach())
        return loss * earlier * float(metrics.get("val_loss", 1.0))


class ReadsItsOwn(Task):
    """Weighs a batch by what it has just logged."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.each(x, y)
        self.log("weighed", loss.detach())
        return loss * float(self.trainer.callback_metrics["weighed"])  # type: ignore[union-attr]


KINDS = {kind.__name__: kind for kind in (ReadsEarlier, ReadsItsOwn)}


def train(info: RankInfo, layout: Layout | None, kind: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after an epoch."""
    return trained_state(info, layout, arguments, KINDS[kind](), max_epochs=1)


@pytest.mark.parametrize(("layout", "arguments"), LAYOUTS, ids=str)
def test_what_earlier_steps_have_logged_is_that_of_one_process(layout: Layout, arguments: dict[str, Any]) -> None:
    expected = one_process(train, None, "ReadsEarlier", {})
    first = run_trainers(train, layout, "ReadsEarlier", arguments, devices=layout[0] * layout[1])[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output


@pytest.mark.parametrize(("layout", "arguments"), LAYOUTS, ids=str)
def test_what_the_step_itself_has_logged_is_refused(layout: Layout, arguments: dict[str, Any]) -> None:
    ranks = layout[0] * layout[1]
    for found in run_trainers(train, layout, "ReadsItsOwn", arguments, devices=ranks, check=False, grace=20.0):
        said = r"reads `weighed` from the Trainer's metrics \(\S+test_logged_reads.py:\d+\) and has logged it itself"
        assert re.search(said, f"{found.error}"), found.error


def test_one_process_reads_what_it_has_logged() -> None:
    expected = one_process(train, None, "ReadsItsOwn", {})
    first = run_trainers(train, (1, 1), "ReadsItsOwn", {"micro_batch_size": 8}, devices=1)[0]
    assert not list(differences("weights", first.value, expected, 1e-9)), first.output
