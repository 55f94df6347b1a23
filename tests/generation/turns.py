"""Steps that call the layers twice, on pipeline stages that sleep."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import make_trainer

ROWS, WIDTH, STEPS = 16, 8, 3


class _Nap:
    """A gradient hook that sleeps. It passes for one of the package's own: a user's runs once per batch."""

    __module__ = "lightning_megatron.data_parallel"
    seconds = 0.0

    def __call__(self, _: Tensor) -> None:
        time.sleep(self.seconds)


class _Layer(nn.Module):
    """Sleeps for each row, twice as long in its backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds, self.nap = nn.Linear(WIDTH, WIDTH), seconds, _Nap()
        self.linear.weight.register_post_accumulate_grad_hook(self.nap)

    def forward(self, x: Tensor) -> Tensor:
        self.nap.seconds = 2 * self.seconds * len(x)
        time.sleep(self.seconds * len(x))
        return self.linear(x)


class Twice(LightningModule):
    """Two views of each row."""

    def __init__(self, stages: int, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(_Layer(seconds) for _ in range(2 * stages))
        self.times: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Of rows [b, WIDTH]."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """How far two views are from each other."""
        return (self(batch) - self(batch.flip(1))).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def timed(info: RankInfo, stages: int, seconds: float, whole: bool) -> float:
    """Seconds of a step, the first one apart."""
    module = Twice(stages, seconds)
    strategy = MegatronStrategy(
        pipeline_parallel_size=stages,
        pipeline_split=[2] * stages,
        micro_batch_size=ROWS // (4 * stages),
        whole_batch_loss=True if whole else "auto",
    )
    trainer = make_trainer(info, strategy, max_epochs=1, limit_val_batches=0)
    trainer.fit(module, DataLoader(torch.rand(ROWS * (1 + STEPS), WIDTH), batch_size=ROWS))  # type: ignore[arg-type]
    return (module.times[-1] - module.times[0]) / STEPS
