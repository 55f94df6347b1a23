"""What a run takes over from the module, the Trainer and torch, looked at before, during and after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from torch.nn.utils import clip_grad

from lightning_megatron import MegatronStrategy
from tests.harness import RankInfo
from tests.parity.train import make_trainer
from tests.strategy.start_scenarios import Built

LIGHTNINGS_QUESTION = ModelCheckpoint._find_last_checkpoints
TORCHS_NORM = clip_grad._get_total_norm


def taken_over(trainer: Trainer, module: LightningModule) -> dict[str, bool]:
    """By what it is, whether something stands in its place."""
    by_type = {type(callback): callback.__dict__ for callback in trainer.callbacks}
    return {
        "log": "log" in module.__dict__,
        "last checkpoint": "_find_last_checkpoints" in by_type[ModelCheckpoint],
        "signals": "_broadcast_sigterm_tensor" in trainer.fit_loop.epoch_loop.__dict__,
        "norm of gradients": clip_grad._get_total_norm is not TORCHS_NORM,
        "clipping": trainer.precision_plugin._gradients is not None,
    }


class Looks(Callback):
    """Notes what is taken over while training."""

    def __init__(self) -> None:
        self.during: dict[str, bool] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.during = taken_over(trainer, pl_module)


def lives(info: RankInfo) -> dict[str, Any]:
    """Two fits and an evaluation of one module, with a look before, in between and after."""
    torch.manual_seed(1)
    strategy = MegatronStrategy(pipeline_parallel_size=2, micro_batch_size=2)
    looks = Looks()
    trainer = make_trainer(
        info,
        strategy,
        max_steps=1,
        limit_val_batches=0,
        callbacks=[looks, ModelSummary(), ModelCheckpoint(dirpath=Path(info.directory, "saved"), save_top_k=0)],
        enable_checkpointing=True,
        enable_model_summary=True,
        gradient_clip_val=1.0,
    )
    module = Built("gpt", late=False)
    try:
        _ = strategy.run
    except RuntimeError as error:
        early = str(error)
    before = taken_over(trainer, module)
    trainer.fit(module)
    first, after = strategy.run, taken_over(trainer, module)
    path = Path(info.directory, "after_fit")
    trainer.save_checkpoint(path)
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(module)
    return {
        "early": early,
        "before": before,
        "during": looks.during,
        "after": after,
        "class": ModelCheckpoint._find_last_checkpoints is LIGHTNINGS_QUESTION,
        "saved": path.is_dir(),
        "another run": strategy.run is not first,
        "same module": strategy.run.assembled is first.assembled,
        "steps": trainer.global_step,
    }
