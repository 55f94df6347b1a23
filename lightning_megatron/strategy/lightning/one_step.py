"""A Trainer for one step on one rank of a cluster that is not there: what a rehearsal needs of Lightning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

LightningModule = pl.LightningModule
"""What is rehearsed."""


@contextmanager
def own_rank_afterwards() -> Iterator[None]:
    """Give Lightning's messages back to this process: what another rank than 0 has to say is not shown."""
    before = rank_zero_only.rank  # type: ignore[attr-defined]
    try:
        yield
    finally:
        rank_zero_only.rank = before  # type: ignore[attr-defined]


class ImaginedCluster(ClusterEnvironment):
    """A cluster in which this process is one rank of many, and launches none.

    Rank 9 of 16 with 8 devices per node is local rank 1 of node 1.

    Args:
        rank: this process's global rank.
        world_size: ranks of the cluster.
        per_node: ranks of each node.
    """

    def __init__(self, rank: int, world_size: int, per_node: int) -> None:
        super().__init__()
        self._rank, self._world_size, self._per_node = rank, world_size, per_node

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._rank % self._per_node

    def node_rank(self) -> int:
        return self._rank // self._per_node


class StepMoments(Callback):
    """Calls functions at the moments of a training step.

    Args:
        start: before the step.
        update: between backward and update.
        end: after the step, with the Trainer's strategy and the module.

    Attributes:
        error: the first exception that ended the Trainer.
    """

    def __init__(
        self, start: Callable[[], None], update: Callable[[], None], end: Callable[[Any, LightningModule], None]
    ) -> None:
        self._start, self._update, self._end = start, update, end
        self.error: BaseException | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        self._start()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._update()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._end(trainer.strategy, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.error = self.error or exception


def one_step_trainer(
    strategy: Any, rank: int, world_size: int, devices_per_node: int, moments: StepMoments, options: dict[str, Any]
) -> pl.Trainer:
    """A silent Trainer that takes one step as ``rank`` of ``world_size``; ``options`` are further arguments of it."""
    per_node = math.gcd(world_size, devices_per_node)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        accelerator="cpu",
        devices=per_node,
        num_nodes=world_size // per_node,
        strategy=strategy,
        plugins=[ImaginedCluster(rank, world_size, per_node)],
        callbacks=[moments],
        max_steps=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{**quiet, **options},
    )
