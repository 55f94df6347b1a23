"""Runs whose memory is measured, or does not suffice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron import MegatronStrategy
from lightning_megatron.callbacks import MemoryTimeline
from lightning_megatron.models import CausalLanguageModel
from tests.harness import RankInfo
from tests.models.scenarios import CONFIGS, Losses
from tests.parity.train import make_trainer
from tests.strategy.report_scenarios import BATCH, STEPS, Rows


class Greedy(CausalLanguageModel):
    """Asks for more memory than there is, at one place of its second step."""

    where = "forward"
    rank = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.where == "forward":
            self._ask()
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self.trainer.global_step == 1 and self.where == "update":
            self._ask()

    def _ask(self) -> None:
        if self.global_rank == self.rank:
            torch.empty(1 << 50)


class Penalised(CausalLanguageModel):
    """Adds a gradient to its loss, for which it differentiates in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        factor = torch.ones((), requires_grad=True, device=self.device)
        (gradient,) = torch.autograd.grad(loss * factor, factor, create_graph=True)
        return loss + 0.1 * gradient


class Convolutional(Greedy):
    """A model that the planner does not know."""

    def configure_model(self) -> None:
        super().configure_model()
        for layer in self.decoder.layers:  # type: ignore[union-attr]
            layer.aside = nn.Linear(64, 640)


def _trainer(info: RankInfo, sizes: dict[str, Any], callbacks: list[Callback], **options: Any) -> Any:
    torch.manual_seed(5)
    options = {"max_steps": STEPS, "limit_val_batches": 0, "num_sanity_val_steps": 0, **options}
    return make_trainer(info, MegatronStrategy(**sizes), callbacks=callbacks, **options)


def _fit(trainer: Any, module: Any) -> None:
    loader = DataLoader(Rows(), BATCH // trainer.strategy.distributed_sampler_kwargs["num_replicas"])
    trainer.fit(module, loader, loader)


def measured(
    info: RankInfo, sizes: dict[str, Any], measures: bool = True, layers: int = 4, batch: int = 6, **options: Any
) -> dict[str, Any]:
    """Losses, and the report of a step."""
    callback, losses = MemoryTimeline(info.directory, batch), Losses()
    trainer = _trainer(info, sizes, [losses, callback] if measures else [losses], **options)
    config = replace(CONFIGS["llama"], vocabulary=256, layers=layers, intermediate=128)
    module = CausalLanguageModel(config, lr=1e-2)
    _fit(trainer, module)
    report = trainer.strategy.memory_report()
    return {
        "losses": losses.seen,
        "report": report,
        "text": str(report),
        "files": sorted(path.name for path in Path(info.directory).glob("memory-*")),
        "parameters": sum(p.numel() for p in module.parameters() if p.untyped_storage().nbytes() > 8),
    }


def too_large(info: RankInfo, sizes: dict[str, Any], where: str, kind: str = "known", rank: int = 0) -> None:
    """Runs out of memory."""
    module = {"known": Greedy, "unknown": Convolutional}[kind](
        replace(CONFIGS["llama"], vocabulary=256, intermediate=128)
    )
    module.where, module.rank = where, rank
    _fit(_trainer(info, sizes, []), module)


def penalised(info: RankInfo, sizes: dict[str, Any]) -> dict[str, Any]:
    """Weights, on rank 0, behind steps that differentiate within themselves."""
    trainer = _trainer(info, sizes, [])
    shares = trainer.strategy.distributed_sampler_kwargs
    sampler = DistributedSampler(Rows(), shuffle=False, **shares)
    loader = DataLoader(Rows(), BATCH // shares["num_replicas"], sampler=sampler)
    trainer.fit(Penalised(replace(CONFIGS["llama"], vocabulary=256, intermediate=128)), loader, loader)
    weights: dict[str, Any] = trainer.strategy.full_state_dict()
    return weights
