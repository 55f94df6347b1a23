"""Runs that save one file in Lightning's format, and that look for the last checkpoint."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import MegatronCheckpointIO
from lightning_megatron.strategy.saving import single_file
from tests.checkpoints.reshard_scenarios import Losses, Tied
from tests.checkpoints.scenarios import trainer_of
from tests.harness import RankInfo, ReusedProcesses


def _trainer(info: RankInfo, steps: int, sizes: tuple[int, int, int], single: bool, callbacks: Any) -> Trainer:
    plugins = [ReusedProcesses(info), MegatronCheckpointIO(single_file=single)]
    return trainer_of(info, steps, sizes, plugins=plugins, callbacks=callbacks, enable_checkpointing=True)


def writes_files(info: RankInfo, folder: str, sizes: tuple[int, int, int]) -> None:
    """``saves/`` of a ModelCheckpoint that keeps one; ``a.ckpt`` and the directory ``b`` of the same step."""
    saves = ModelCheckpoint(f"{folder}/saves", "{step}", every_n_train_steps=1, save_top_k=1, save_last="link")
    trainer = _trainer(info, 2, sizes, True, [saves, Losses()])
    trainer.fit(Tied(seed=4))
    trainer.save_checkpoint(f"{folder}/b")
    trainer.strategy.checkpoint_io.single_file = False  # type: ignore[attr-defined]
    trainer.save_checkpoint(f"{folder}/a.ckpt")  # a directory, which the file replaces
    trainer.save_checkpoint(f"{folder}/b")
    trainer.strategy.checkpoint_io.single_file = True  # type: ignore[attr-defined]
    trainer.save_checkpoint(f"{folder}/a.ckpt")


def goes_on_from(info: RankInfo, path: str, sizes: tuple[int, int, int]) -> list[float]:
    """Losses of the two steps after a checkpoint."""
    warnings.filterwarnings(
        "ignore", message="(The dirpath has changed|Be aware that when using `ckpt_path`, callbacks)"
    )
    losses = Losses()
    trainer_of(info, 4, sizes, callbacks=[losses]).fit(Tied(seed=5), ckpt_path=path)
    return losses.values


def cannot_export(info: RankInfo, folder: str) -> str:
    """What the second save says, whose file does not fit on the disk."""
    saves = ModelCheckpoint(folder, "same", every_n_train_steps=1, save_top_k=1, enable_version_counter=False)
    export = single_file.export_lightning

    def full(source: Any, path: Path) -> None:
        if source.meta["global_step"] == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        export(source, path)

    try:
        with mock.patch.object(single_file, "export_lightning", full):
            _trainer(info, 4, (2, 1, 1), True, [saves]).fit(Tied())
    except RuntimeError as error:
        return str(error)
    return "saved"


def searches(info: RankInfo, folder: str, single: bool) -> dict[str, str]:
    """Where runs with ``ckpt_path="last"`` begin, by what is in the folder; each takes two steps more."""
    warnings.filterwarnings("ignore", message=".*there is no last checkpoint")
    warnings.filterwarnings("ignore", message=".*exists and is not empty")
    found = {}

    def run(name: str, where: str, steps: int, last: bool, ckpt_path: str | None = "last") -> Trainer:
        saves = ModelCheckpoint(f"{folder}/{where}", "{step}", every_n_train_steps=2, save_top_k=-1, save_last=last)
        losses = Losses()
        trainer = _trainer(info, steps, (1, 1, 1), single, [saves, losses])
        trainer.fit(Tied(seed=5), ckpt_path=ckpt_path)
        begun = steps - len(losses.values)
        found[name] = f"step {begun}" if begun else "begins anew"
        return trainer

    run("first", "a", 2, False, None)
    run("without save_last", "a", 4, False)
    run("with save_last", "a", 4, True, None)
    run("with save_last", "a", 6, True)
    run("newer without", "a", 8, False)
    run("first", "b", 2, False, None).save_checkpoint(f"{folder}/b/preempted.ckpt")
    run("stopped by a signal", "b", 4, False)
    del found["first"]
    return found
