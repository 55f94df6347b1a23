"""A training script as a user would start it: ``python launch_script.py ordinary|fail|wait|save|early``."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_megatron import MegatronStrategy
from tests.parity.zoo.language import LearnedPositions
from tests.parity.zoo.tasks import TokenTask


class Say(Callback):
    """Tells the test which processes run, and fails or waits when asked to."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            print(f"STARTED rank={trainer.global_rank} pid={os.getpid()}", flush=True)
        if self.mode == "fail" and trainer.global_step == 2 and trainer.global_rank == 1:
            raise ArithmeticError("deliberate failure in a launched rank")
        if self.mode in ("wait", "save"):
            time.sleep(0.05)


def main(mode: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if mode == "early" and os.environ.get("LOCAL_RANK") == "1":
        sys.exit(7)
    trainer = Trainer(
        strategy=MegatronStrategy(pipeline_parallel_size=2, micro_batch_size=2),
        accelerator="cpu",
        devices=2,
        max_steps=100_000 if mode in ("wait", "save") else 6,
        limit_val_batches=0,
        callbacks=[Say(mode)],
        logger=False,
        enable_checkpointing=mode == "save",
        default_root_dir=os.getcwd(),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(TokenTask(LearnedPositions()))
    print(f"DONE rank={trainer.global_rank} loss={float(trainer.callback_metrics['train_loss']):.6f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
