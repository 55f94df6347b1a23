"""What the strategy itself costs: one process, a model of one number, Lightning's SingleDeviceStrategy beside it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from tests.benchmarks.contestants import Round, alternate, trainer_round
from tests.benchmarks.model import Size
from tests.harness import RankInfo

CONFIG = "one parameter of one number, one logged key, SGD"


class Empty(LightningModule):
    """Almost nothing but Lightning."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.weight.sum()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def play(info: RankInfo, size: Size, steps: int, rounds: int) -> list[tuple[Round, Round]]:
    """Rounds of both."""
    return alternate(
        lambda: trainer_round(info, size, steps, MegatronStrategy(), 1, Empty),
        lambda: trainer_round(info, size, steps, SingleDeviceStrategy("cpu"), 1, Empty),
        rounds,
    )
