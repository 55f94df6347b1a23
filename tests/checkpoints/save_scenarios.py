"""Saves that fail, and saves that run in the background."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron import MegatronCheckpointIO
from lightning_megatron.checkpoints.files import storage
from lightning_megatron.checkpoints.files.directory import newest_complete, open_checkpoint
from tests.checkpoints.reshard_scenarios import Grid, Tied, tensors_of
from tests.harness import RankInfo, ReusedProcesses
from tests.parity.train import make_trainer


def _trainer(info: RankInfo, io: Any, callbacks: list[Callback], steps: int = 4) -> Trainer:
    return make_trainer(
        info,
        Grid(pipeline=2).strategy(),
        max_steps=steps,
        callbacks=callbacks,
        plugins=[ReusedProcesses(info), io],
        enable_checkpointing=True,
        use_distributed_sampler=True,
    )


class _Failing:
    """Stands for a full disk or a forbidden folder on one rank."""

    def __init__(self, kind: str) -> None:
        number = errno.ENOSPC if kind == "full" else errno.EACCES
        self.error = OSError(number, os.strerror(number))

    def __call__(self, *_: Any) -> int:
        raise self.error


def _failing(kind: str) -> Any:
    return mock.patch.object(storage.SummedFile, "write", _Failing(kind))


def cannot_write(info: RankInfo, folder: str, kind: str) -> list[str]:
    """Rank 1 fails at the second save."""
    report: list[str] = []

    class SaveTwice(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(f"{folder}/same.ckpt")
            elif trainer.global_step == 2:
                try:
                    with _failing(kind) if info.rank == 1 else nullcontext():
                        trainer.save_checkpoint(f"{folder}/same.ckpt")
                except RuntimeError as error:
                    named = "rank 1: " in str(error) and _Failing(kind).error.strerror in str(error)
                    report.append("rank 1 is named" if named else str(error))

    trainer = _trainer(info, MegatronCheckpointIO(), [SaveTwice()])
    trainer.fit(Tied())
    trainer.strategy.barrier()
    newest = newest_complete(folder)
    step = torch.load(f"{newest}/meta.pt", weights_only=True)["global_step"]
    left = [path.name for path in Path(folder).iterdir() if path.name != "same.ckpt"]
    return [*report, f"step {step} is the newest", f"left: {left}" if left else "nothing is left over"]


def background(info: RankInfo, folder: str) -> dict[str, Any]:
    """The save of step 2 is held back until step 4 has begun."""
    seen: dict[str, Any] = {"steps_meanwhile": False}
    gate = threading.Event()
    publish = storage.BoxWriter.write_data

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 2:
                holding.start()
                self.state = {name: value.clone() for name, value in module.state_dict().items()}
                trainer.save_checkpoint(f"{folder}/held.ckpt")
                trainer.strategy.remove_checkpoint(f"{folder}/before.ckpt")
                seen["removed_too_early"] = info.rank == 0 and not Path(f"{folder}/before.ckpt").exists()
            elif trainer.global_step == 1:
                trainer.save_checkpoint(f"{folder}/before.ckpt")
                trainer.strategy.checkpoint_io.wait()  # type: ignore[attr-defined]
            elif trainer.global_step == 4:
                seen["steps_meanwhile"] = not Path(f"{folder}/held.ckpt").exists()
                trainer.strategy.barrier()
                gate.set()

    def held_back(self: Any, plan: Any, planner: Any) -> Any:
        assert gate.wait(60)
        return publish(self, plan, planner)

    watch, holding = Watch(), mock.patch.object(storage.BoxWriter, "write_data", held_back)
    try:
        _trainer(info, MegatronCheckpointIO(async_save=True), [watch]).fit(Tied())
    finally:
        holding.stop()
    meta = torch.load(Path(open_checkpoint(f"{folder}/held.ckpt").path) / "meta.pt", weights_only=True)
    stored = tensors_of(f"{folder}/held.ckpt")
    assert not Path(f"{folder}/before.ckpt").exists() or info.rank != 0
    equal = all(torch.equal(value, stored[name]) for name, value in watch.state.items() if name in stored)
    return {**seen, "loaded_step": meta["global_step"], "equal": equal}


def failing_background(info: RankInfo, folder: str) -> None:
    """The disk of rank 1 is full when the save of step 2 writes; every rank waits for the news before step 3."""

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                with _failing("full") if info.rank == 1 else nullcontext():
                    trainer.save_checkpoint(f"{folder}/never.ckpt")
                    pending = trainer.strategy.checkpoint_io._pending  # type: ignore[attr-defined]
                    pending.exception()

        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            print("at step", trainer.global_step + 1)

        def on_exception(self, trainer: Trainer, *_: Any) -> None:
            print("failed at step", trainer.global_step + 1)

    _trainer(info, MegatronCheckpointIO(async_save=True), [Watch()]).fit(Tied())


def wrapped(info: RankInfo, folder: str) -> list[Any]:
    """What becomes of other plugins."""
    folder = f"{folder}/new"  # made by the first save; the link to it comes at once
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1, save_last="link")
    trainer = _trainer(info, AsyncCheckpointIO(), [saves])
    trainer.fit(Tied())
    found: list[Any] = [
        trainer.strategy.checkpoint_io.async_save,
        newest_complete(folder) == f"{folder}/step=4.ckpt",
    ]
    try:
        _trainer(info, TorchCheckpointIO(), []).fit(Tied())
    except MisconfigurationException as error:
        found.append("TorchCheckpointIO" in str(error))
    return found
