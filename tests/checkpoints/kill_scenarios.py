"""A run that is killed again and again.

As a script it does so at length: ``python -m tests.checkpoints.kill_scenarios --kills 30 --seed 1``.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_megatron import MegatronCheckpointIO
from lightning_megatron.checkpoints.files import directory
from lightning_megatron.checkpoints.files.folder import Folder
from lightning_megatron.data_parallel.update.hosted_steps import UpdateJob
from tests.checkpoints.reshard_scenarios import Grid, Tied, trainer_of
from tests.harness import Outcome, RankInfo, ReusedProcesses, run_job, run_trainers
from tests.parity.train import make_trainer

# What a rank says that has lost another one; anything else that ends a run is a failure of its own.
LOST = re.compile(
    r"closed its connection|[Cc]onnection (was |likely )*(closed|reset|refused)|Broken pipe|sent nothing for"
    r"|rank \d+ \(pipeline .*(failed|died|ended|taken no part)|another rank had failed"
)
GRIDS = (Grid(pipeline=2), Grid(data=2), Grid(tensor=2), Grid(pipeline=2, data=2))


@dataclass(frozen=True)
class Kill:
    """When a rank kills itself.

    Attributes:
        rank: which; -1 for all at once.
        seconds: after the start of training, or
        operation: at this file operation of a save (a flush, a write, a rename, a removal), counted from 1, or
        bucket: once so many buckets have been stepped on in host memory or in files, counted from 1.
    """

    rank: int
    seconds: float = 0.0
    operation: int = 0
    bucket: int = 0


class Killer(Callback):
    """Carries a `Kill` out, and notes the step that the run went on from."""

    def __init__(self, kill: Kill | None, rank: int, notes: Path) -> None:
        self.kill = kill if kill is not None and kill.rank in (rank, -1) else None
        self.notes = notes if rank == 0 else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.notes is not None:
            self.notes.write_text(str(trainer.global_step))
        if self.kill is not None and self.kill.operation:
            _count_operations(self.kill.operation)
        elif self.kill is not None and self.kill.bucket:
            _count_buckets(self.kill.bucket)
        elif self.kill is not None:
            threading.Timer(self.kill.seconds, _die).start()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _count_operations(last: int) -> None:
    left = [last]

    def counting(original: Any) -> Any:
        def operation(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                _die()
            return original(*args, **kwargs)

        return operation

    for name in ("write", "flush", "flush_names", "rename_to", "remove", "remove_file", "open"):
        setattr(Folder, name, counting(getattr(Folder, name)))


def _count_buckets(last: int) -> None:
    left, leave = [last], UpdateJob.leave

    def leaving(self: UpdateJob) -> None:
        left[0] -= 1
        if left[0] == 0:
            _die()
        leave(self)

    UpdateJob.leave = leaving


def run(info: RankInfo, grid: Grid, folder: str, steps: int, kill: Kill | None, async_save: bool) -> dict[str, Tensor]:
    """Trains from the newest checkpoint until ``steps``, or until it is killed; returns this rank's weights."""
    warnings.filterwarnings("ignore", message="ignoring an incomplete checkpoint")
    warnings.filterwarnings("ignore", message=".*there is no last checkpoint")
    saves = ModelCheckpoint(f"{folder}/saves", "{step}", "loss", save_top_k=2, every_n_train_steps=1, save_last=True)
    killer = Killer(kill, info.rank, Path(folder) / "resumed_at")
    options: dict[str, Any] = {"enable_checkpointing": True, "use_distributed_sampler": True, "max_epochs": -1}
    plugins = [ReusedProcesses(info), MegatronCheckpointIO(async_save=async_save)]
    trainer = make_trainer(
        info, grid.strategy(), max_steps=steps, callbacks=[saves, killer], plugins=plugins, **options
    )
    module = Tied(seed=9)
    trainer.fit(module, ckpt_path="last")
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def undisturbed(info: RankInfo, grid: Grid, steps: int) -> dict[str, Tensor]:
    """The same run without checkpoints and without kills."""
    trainer = trainer_of(info, grid, steps, Callback())
    trainer.fit_loop.max_epochs = -1
    trainer.gradient_clip_val = None
    module = Tied(seed=9)
    trainer.fit(module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def kill_again_and_again(
    kills: int, seed: int, grid: Grid, async_save: bool, folder: str, report: Any, plain: Grid | None = None
) -> None:
    """Kills, restarts, and at the end compares with a run that nobody disturbed, on the grid ``plain`` if it is given.

    Raises:
        AssertionError: a restart did not go on from the newest whole checkpoint, or the end differs.
    """
    dice = random.Random(seed)
    saves, reached, done = f"{folder}/saves", 0, 0
    while done < kills:
        rank = dice.choice([-1, *range(grid.ranks)])
        kinds = [Kill(rank, seconds=dice.uniform(0.05, 1.5)), Kill(rank, operation=dice.randint(1, 60))]
        if plain is not None:  # the optimizer steps bucket by bucket
            kinds.append(Kill(rank, bucket=dice.randint(1, 40)))
        kill = kinds[dice.randrange(len(kinds))] if done >= len(kinds) else kinds[-1 - done]
        outcomes = run_job(
            run, grid.ranks, grid, folder, reached + 400, kill, async_save, check=False, deadline=60.0, grace=12.0
        )
        _check_killed(outcomes, kill)
        done += 1
        went_on = int((Path(folder) / "resumed_at").read_text())
        newest = _newest_step(saves)
        assert went_on == reached, f"{kill}: went on at {went_on}, the newest whole checkpoint was at {reached}"
        assert newest >= reached, f"{kill}: the checkpoint of step {reached} is gone, {newest} is the newest"
        report(f"{done} killed, {kill}: from step {went_on} to a whole checkpoint at {newest}")
        reached = newest
    steps = reached + 2
    got = run_trainers(run, grid, folder, steps, None, async_save, devices=grid.ranks)
    wanted = run_trainers(undisturbed, plain or grid, steps, devices=grid.ranks)
    for mine, other in zip(got, wanted, strict=True):
        for name, value in other.value.items():
            assert torch.equal(mine.value[name], value), f"{name} differs after {done} kills and {steps} steps"
    report(f"{done} kills, {steps} steps: weights equal those of the undisturbed run bit for bit")


def _check_killed(outcomes: list[Outcome], kill: Kill) -> None:
    """A crash is not a kill: the ranks that were to be killed were, by the signal, and the others ended of that alone.

    Where all are to be killed at once, one is first, and another may hear of it before its own clock rings.

    Raises:
        AssertionError: with what another rank said.
    """
    killed = f"process ended with exit code {-signal.SIGKILL}"
    assert any(outcome.error == killed for outcome in outcomes), f"{kill}: {outcomes}"
    for outcome in outcomes:
        error = outcome.error or ""
        assert error == killed if kill.rank == outcome.rank else error == killed or LOST.search(error), (
            f"{kill}: {outcome}"
        )


def _newest_step(saves: str) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        newest = directory.newest_complete(saves)
    return 0 if newest is None else directory.read_marker(Folder(newest)).step


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(description="Kill a run at random, many times.")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    share = -(-options.kills // (2 * len(GRIDS)))
    start = time.monotonic()
    for number, grid in enumerate(GRIDS):
        for async_save in (False, True):
            folder = tempfile.mkdtemp(prefix="kills-")
            print(f"{grid}, async_save={async_save}", flush=True)
            kill_again_and_again(share, options.seed + number, grid, async_save, folder, _print)
            shutil.rmtree(folder)
    print(f"{2 * len(GRIDS) * share} kills in {time.monotonic() - start:.0f} s", flush=True)


def _print(line: str) -> None:
    print("   ", line, flush=True)


if __name__ == "__main__":
    from tests.checkpoints.kill_scenarios import main as by_name  # workers import what they run by name

    by_name()
