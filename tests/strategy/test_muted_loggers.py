"""Steps that speak to a logger themselves: what they say in trials is not kept, and they are warned of."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron.strategy.loss.muted_loggers import muted
from tests.harness import RankInfo, run_trainers
from tests.parity.scenario import Layout, trainer_for
from tests.strategy.loss_modules import BATCH, STEPS, Task, dealt, tokens


class Listening(Logger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    @property
    def name(self) -> str:
        return "listening"

    @property
    def version(self) -> int:
        return 0

    @property
    def experiment(self) -> Any:
        return self.told

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.told.append((metrics, step))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Keep nothing."""


class Speaking(Task):
    """Tells its logger the loss itself."""

    def train_dataloader(self) -> DataLoader[Any]:
        return dealt(self, TensorDataset(*tokens(BATCH * STEPS)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        assert isinstance(self.logger, Listening)
        self.logger.log_metrics({"own": float(output["loss"].detach())}, batch_idx)
        return output


class OfModule(torch.nn.Module):
    """Has a Trainer that has a logger."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._trainer = type("Run", (), {"loggers": [logger]})()


def test_loggers_keep_their_class_and_say_nothing() -> None:
    logger = Listening()
    with muted(OfModule(logger)):
        logger.log_metrics({"a": 1.0}, 0)
        logger.experiment.add_scalar("a", 1.0, 0)
        assert isinstance(logger, Listening) and logger.name == "listening"
    assert type(logger) is Listening and not logger.told
    logger.log_metrics({"a": 1.0}, 0)
    assert logger.told == [({"a": 1.0}, 0)]


def spoken(info: RankInfo, layout: Layout, warned: bool) -> list[int]:
    """Steps in which the logger was told the loss."""
    logger = Listening()
    with warnings.catch_warnings():
        if not warned:
            warnings.filterwarnings("ignore", message=".*tells a logger something itself")
        trainer_for(info, layout, {"micro_batch_size": "auto"}, max_epochs=1, logger=logger).fit(Speaking())
    return [step for metrics, step in logger.told if "own" in metrics]


@pytest.mark.wide
def test_what_a_step_says_in_trials_is_not_kept() -> None:
    for outcome in run_trainers(spoken, (1, 2), False, devices=2):
        assert outcome.value == list(range(STEPS))


def test_a_step_that_speaks_for_its_replica_is_warned_of() -> None:
    first = run_trainers(spoken, (1, 2), True, devices=2, check=False, grace=20.0)[0]
    said = re.sub(r"\s+", " ", f"{first.error} {first.output}")
    assert "`training_step` tells a logger something itself (" in said
    assert "test_muted_loggers.py:" in said
