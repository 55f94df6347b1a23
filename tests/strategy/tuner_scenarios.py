"""Trains with Lightning's tuners and monitors, at any layout or in plain Lightning."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelPruning, throughput_monitor
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.strategy.averaging_scenarios import WIDTH, Regression

Sizes = tuple[int, int, int] | None
FLOPS = 10**6
"""Per second, that a device is said to be capable of."""


class Tuned(Regression):
    """Its learning rate and batch size are attributes, which tuners set; nothing is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.out.weight = nn.Parameter(self.out.weight.detach().clone() * 0.9 + 0.01)
        self.lr, self.batch_size = 1e-2, 8

    def _loader(self, seed: int) -> DataLoader[Tensor]:
        data: Any = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        own = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        sampler: Any = DistributedSampler(data, shuffle=False, **own)
        return DataLoader(data, batch_size=max(1, self.batch_size // own["num_replicas"]), sampler=sampler)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Losses(Callback):
    """Validation losses."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.found.append(float(trainer.callback_metrics["val_loss"]))


KINDS: dict[str, Any] = {
    "batch size": lambda: BatchSizeFinder(max_trials=3, init_val=2),
    "batch size, halved": lambda: BatchSizeFinder(mode="binsearch", max_trials=4, init_val=2),
    "learning rate": lambda: LearningRateFinder(min_lr=1e-5, max_lr=1e-1, num_training_steps=12),
    "lottery": lambda: ModelPruning("l1_unstructured", amount=0.3),
    "pruning": lambda: ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False),
}


def tuned(info: RankInfo, kind: str, sizes: Sizes, sharding: bool = True) -> tuple[list[float], dict[str, Tensor]]:
    """What was found, the losses of the fit that follows, and its weights on rank 0; ``None`` is plain Lightning."""
    warnings.simplefilter("ignore")
    strategy: Any = "auto" if sizes is None else MegatronStrategy(*sizes, optimizer_sharding=sharding)
    losses = Losses()
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": [KINDS[kind](), losses]}
    trainer, module = make_trainer(info, strategy, **options), Tuned()
    trainer.fit(module)
    state = module.state_dict() if sizes is None else strategy.full_state_dict()
    found = [module.lr, float(module.batch_size), float(trainer.global_step), *losses.found]
    return found, {name: value.clone() for name, value in state.items()}


def tuned_by_a_tuner(info: RankInfo, sizes: Sizes) -> list[float]:
    """Batch sizes that a Tuner finds for every function of the Trainer, one after the other."""
    warnings.simplefilter("ignore")
    module, found = Tuned(), []
    for method in ("fit", "validate"):
        strategy: Any = "auto" if sizes is None else MegatronStrategy(*sizes)
        tuner: Any = Tuner(make_trainer(info, strategy, max_epochs=1))
        found.append(float(tuner.scale_batch_size(module, method=method, max_trials=3, init_val=2)))
    return found


def rates(info: RankInfo, sizes: Sizes) -> list[dict[str, float]]:
    """Rows of ThroughputMonitor's metrics in training, on rank 0."""
    warnings.simplefilter("ignore")
    folder = f"{info.directory}/rates-{sizes}"
    monitor = ThroughputMonitor(lambda batch: int(batch.size(0)), lambda batch: batch.numel(), window_size=3)
    strategy: Any = "auto" if sizes is None else MegatronStrategy(*sizes)
    options: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}
    trainer = make_trainer(info, strategy, callbacks=[monitor], logger=CSVLogger(folder), **options)
    module = Tuned()
    module.flops_per_batch = 1_000  # type: ignore[assignment]
    with mock.patch.object(throughput_monitor, "get_available_flops", return_value=FLOPS):
        trainer.fit(module)
    if info.rank:
        return []
    with Path(trainer.logger.log_dir, "metrics.csv").open() as file:  # type: ignore[union-attr,arg-type]
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "train/device/samples_per_sec" in row]
