"""Predictions that do what one process refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.strategy.door_scenarios import WIDTH, Plain, Sizes


class Logs(Plain):
    """Logs in its ``predict_step``."""

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        x = self.into(batch)
        for layer in self.layers:
            x = x + layer(x)
        output: Tensor = self.head(x)
        self.log("x", 1.0)
        return output


def logged(info: RankInfo, sizes: Sizes | None) -> None:
    """Predict with a module that logs."""
    trainer = make_trainer(info, "auto" if sizes is None else MegatronStrategy(*sizes))
    data: Any = torch.randn(4, WIDTH, dtype=torch.float64)
    trainer.predict(Logs(), DataLoader(data, batch_size=4))
