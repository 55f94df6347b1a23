"""Records steps of stages that sleep for known times."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.callbacks import PipelineProfile, PipelineTimeline
from lightning_megatron.pipeline.forwards.stack import ForwardSlot, ForwardStack
from tests.benchmarks.sleeping import WIDTH, Sleeper, Sleeps
from tests.harness import RankInfo, ReusedProcesses


def recorded(info: RankInfo, schedule: str, sleeps: Sleeps, directory: str, record: bool = True) -> dict[str, Any]:
    """Two batches; the second is written to ``directory``."""
    callback = PipelineTimeline(directory, batch=2)
    strategy = MegatronStrategy(
        pipeline_parallel_size=sleeps.stages,
        data_parallel_size=info.world_size // sleeps.stages,
        micro_batch_size=1,
        pipeline_schedule=schedule,
        record_timeline=record,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=info.world_size,
        strategy=strategy,
        plugins=[ReusedProcesses(info)],
        max_steps=2,
        logger=False,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=info.directory,
    )
    batches: Any = DataLoader(torch.randn(2, sleeps.micro_batches, WIDTH), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Sleeper(sleeps), train_dataloaders=batches)
    assert callback.measured is not None and callback.predicted is not None
    return {"measured": callback.measured, "predicted": callback.predicted, "summary": callback.summary()}


class Uneven(Sleeper):
    """Layers that sleep longer and longer, and a head that sleeps too."""

    def __init__(self, sleeps: Sleeps) -> None:
        super().__init__(sleeps)
        for index, layer in enumerate(self.layers):
            layer.sleeps = replace(sleeps, forward=sleeps.forward * (1 + index))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        time.sleep(self.layers[0].sleeps.forward)
        return loss


class Contained(Uneven):
    """Layers that are containers, whose parts the step calls one by one."""

    def __init__(self, sleeps: Sleeps) -> None:
        super().__init__(sleeps)
        self.layers = nn.ModuleList([nn.ModuleList([layer]) for layer in self.layers])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch + self.shift
        for (layer,) in self.layers:
            x = layer(x)
        time.sleep(self.layers[0][0].sleeps.forward)
        return x.square().mean()


def profiled(
    info: RankInfo, schedule: str, sleeps: Sleeps, split: list[int], contained: bool = False, batches: int = 2
) -> dict[str, Any]:
    """Six batches, of which two are measured unless told otherwise."""
    callback = PipelineProfile(batches)
    strategy = MegatronStrategy(
        pipeline_parallel_size=sleeps.stages,
        micro_batch_size=1,
        pipeline_schedule=schedule,
        pipeline_split=split,
        record_timeline=True,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=info.world_size,
        strategy=strategy,
        plugins=[ReusedProcesses(info)],
        max_steps=6,
        logger=False,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=info.directory,
    )
    loader: Any = DataLoader(torch.randn(6, sleeps.micro_batches, WIDTH), batch_size=None)  # type: ignore[arg-type]
    module = Contained(sleeps) if contained else Uneven(sleeps)
    trainer.fit(module, train_dataloaders=loader)
    left = [name for name, child in module.named_modules() if ForwardStack.of(child).get(ForwardSlot.PROFILE)]
    return {"report": callback.report, "imbalance": callback.imbalance, "split": callback.split, "left": left}
