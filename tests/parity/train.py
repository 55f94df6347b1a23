"""Runs a row's Trainer on one rank and brings back everything that parity is judged by."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from tests.harness import RankInfo, ReusedProcesses
from tests.harness.device import on_gpu, trainer_devices
from tests.parity.row import CLIPS, Row
from tests.parity.zoo.registry import build


@dataclass
class Trace:
    """What one rank saw of a run.

    Attributes:
        losses: what ``training_step`` gave the loop, per batch.
        metrics: ``callback_metrics`` after each batch, after each validation and at the end, in order.
        rates: learning rate of the first group after each batch.
        weights: parameters that this rank holds after training, by fully qualified name, tied ones under each of their
            names; the whole state where tensors are split.
        best_score: ModelCheckpoint's best monitored value.
        best_name: file name of the checkpoint it chose.
        steps: optimizer steps taken.
    """

    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    best_score: float = float("nan")
    best_name: str = ""
    steps: int = 0


class Recorder(Callback):
    """Writes a `Trace` as training goes."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.trace.losses.append(float(outputs["loss"]))
        self.trace.metrics.append(_numbers(trainer))
        self.trace.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trace.metrics.append(_numbers(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trace.metrics.append(_numbers(trainer))  # those of the last epoch among them


def _numbers(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def make_strategy(row: Row) -> Any:
    """The strategy a row asks for, with the row's arguments."""
    if row.strategy == "plain":
        return "auto"
    if row.strategy == "ddp":
        return DDPStrategy(process_group_backend="nccl" if on_gpu() else "gloo")
    from lightning_megatron import MegatronStrategy

    pipeline, data, tensor = row.sizes
    return MegatronStrategy(
        pipeline_parallel_size=pipeline,
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        context_parallel_size=row.context,
        sequence_parallel=row.sequence,
        micro_batch_size=row.micro_batch or "auto",
        pipeline_schedule=row.schedule,
    )


def make_trainer(info: RankInfo, strategy: Any, **options: Any) -> Trainer:
    """A quiet float64 Trainer on this job's processes; ``options`` override."""
    settings: dict[str, Any] = {
        **trainer_devices(info.world_size),
        "strategy": strategy,
        "plugins": [ReusedProcesses(info)] if strategy != "auto" else None,
        "precision": "64-true",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
        "log_every_n_steps": 1,
        "default_root_dir": info.directory,
    }
    return Trainer(**{**settings, **options})


def train(info: RankInfo, row: Row) -> Trace:
    """Fits the row's module and returns this rank's `Trace`."""
    trace, clip = Trace(), CLIPS[row.clip]
    best = ModelCheckpoint(dirpath=Path(info.directory) / "best", monitor="val_loss", save_top_k=1)
    trainer = make_trainer(
        info,
        make_strategy(row),
        max_steps=row.steps,
        accumulate_grad_batches=row.accumulate,
        gradient_clip_val=clip[0] if clip else None,
        gradient_clip_algorithm=clip[1] if clip else None,
        enable_checkpointing=True,
        num_sanity_val_steps=1,
        callbacks=[Recorder(trace), best],
    )
    module = build(row.module)
    if own := getattr(module, "own_of_replicas", ""):  # which is true, and said
        warnings.filterwarnings("ignore", f"`training_step` writes {own} from the samples of each")
    trainer.fit(module)
    whole: Any = trainer.strategy
    trace.weights = whole.full_state_dict() if row.sizes[2] > 1 else local_weights(module)
    trace.steps = trainer.global_step
    trace.best_name = Path(best.best_model_path).name
    trace.best_score = float("nan") if best.best_model_score is None else float(best.best_model_score)
    return trace


def local_weights(module: LightningModule) -> dict[str, Tensor]:
    """Copies of the parameters that this rank holds; a tied parameter under each of its names."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter.detach().clone().to(torch.float64) for name, parameter in named}
