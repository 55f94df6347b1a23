"""One round of each contestant: a few warm-up steps, a barrier, the measured steps, a barrier."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader

from lightning_megatron.tools.rehearsal.meter import MemoryMeter, Metered
from tests.benchmarks.model import Size, Task, make_batches
from tests.harness import RankInfo, ReusedProcesses

# Steps 1 and 8 also try what the loss of a batch is made of, and up to step 16 others may; the next are 64 and 512.
WARM_UP = 16


@dataclass(frozen=True)
class Round:
    """Result of one round.

    Attributes:
        seconds: wall time per step, from barrier to barrier.
        cpu: processor seconds of this process per step, which neighbours on the machine disturb less.
        loss: the last step's loss where this rank knows it, so that rounds can be seen to do the same work.
        peak: the most bytes of tensors that lived at once in the measured steps, where it was metered.
    """

    seconds: float
    cpu: float
    loss: float
    peak: int = 0


class Clock:
    """Wall and processor time since the start, per step; a meter that runs starts afresh with it."""

    def __init__(self) -> None:
        _meet()
        mode = _get_current_dispatch_mode()
        if isinstance(mode, Metered):
            mode.meter.start()
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def per_step(self, steps: int) -> tuple[float, float]:
        """Both, divided by ``steps``, once every rank has arrived."""
        cpu = time.process_time() - self.cpu
        _meet()
        return (time.perf_counter() - self.wall) / steps, cpu / steps


class Stopwatch(Callback):
    """Times a Trainer's steps, everything between them included."""

    def __init__(self, steps: int) -> None:
        self.steps, self.result = steps, (0.0, 0.0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP:
            self.clock = Clock()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP + self.steps - 1:
            self.result = self.clock.per_step(self.steps)


def trainer_round(
    info: RankInfo,
    size: Size,
    steps: int,
    strategy: Any,
    sequences: int,
    task: Callable[[Size], LightningModule] = Task,
    callbacks: list[Callback] | None = None,
    devices: int | None = None,
) -> Round:
    """A whole Trainer with ``strategy``; ``sequences`` per step in this process's loader. With ``devices=1`` it knows
    of this process alone.
    """
    watch = Stopwatch(steps)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices or info.world_size,
        strategy=strategy,
        plugins=[ReusedProcesses(info)] if devices is None else [],
        max_steps=WARM_UP + steps,
        logger=False,
        callbacks=[watch, *(callbacks or [])],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=info.directory,
    )
    torch.manual_seed(0)
    batches: Any = DataLoader(make_batches(size, WARM_UP + steps, sequences), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(task(size), train_dataloaders=batches)
    return Round(*watch.result, float(trainer.callback_metrics["train_loss"]))


def alternate(ours: Callable[[], Round], theirs: Callable[[], Round], rounds: int) -> list[tuple[Round, Round]]:
    """Rounds of both in turn; who goes first alternates too, as what runs second finds warmer caches.

    One more round of each is run under a meter, and only its peak of memory is kept, with the last round.
    """
    results = []
    for index in range(rounds):
        other = theirs() if index % 2 else None
        own = ours()
        results.append((own, other or theirs()))
    own, other = results[-1]
    results[-1] = replace(own, peak=_peak(ours)), replace(other, peak=_peak(theirs))
    return results


def _peak(play: Callable[[], Round]) -> int:
    meter = MemoryMeter()
    with Metered(meter):
        play()
    return meter.peak


def _meet() -> None:
    if distributed.is_initialized():
        distributed.barrier()


def ensure_group(info: RankInfo) -> None:
    """A process group for a contestant without a Trainer."""
    if not distributed.is_initialized():
        address = f"tcp://127.0.0.1:{info.port}"
        distributed.init_process_group("gloo", init_method=address, rank=info.rank, world_size=info.world_size)
