"""Whole Trainers inside reused processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.environments import ClusterEnvironment
from torch import distributed

from tests.harness.device import on_gpu
from tests.harness.job import Outcome, RankInfo
from tests.harness.pool import run_job
from tests.harness.remember import remembered


class ReusedProcesses(ClusterEnvironment):
    """A cluster whose processes exist already: Lightning launches nothing and takes ranks and port from the job.

    Args:
        info: this process's place in the job.
    """

    def __init__(self, info: RankInfo) -> None:
        super().__init__()
        self.info = info
        self._store: Any = None
        rank_zero_only.rank = info.rank

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """The port of the job; asked for just before the ranks meet there."""
        if self._store is None and not distributed.is_initialized():
            self._store = self.info.meet()
        return self.info.port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.info.world_size

    def set_world_size(self, size: int) -> None:
        """Lightning announces what it was told; the job's size stands.

        Raises:
            ValueError: when the Trainer's ``devices`` do not fit the job.
        """
        if size != self.info.world_size:
            raise ValueError(
                f"Trainer(devices={size}) runs in a job of {self.info.world_size} processes; make them equal"
            )

    def global_rank(self) -> int:
        if distributed.is_initialized():
            self._store = None  # the process group has it now, and closes it
        return self.info.rank

    def set_global_rank(self, rank: int) -> None:
        if rank != self.info.rank:
            raise ValueError(f"rank {rank} was announced on rank {self.info.rank}")
        rank_zero_only.rank = rank

    def local_rank(self) -> int:
        return 0 if on_gpu() else self.info.rank

    def node_rank(self) -> int:
        return self.info.rank if on_gpu() else 0


def run_trainers(
    function: Callable[..., Any],
    *args: Any,
    devices: int,
    **options: Any,
) -> list[Outcome]:
    """Runs ``function(info, *args)`` on ``devices`` processes, where it builds and uses a Trainer.

    The Trainer must be given ``plugins=[ReusedProcesses(info)]`` and `trainer_devices`.

    Args:
        function: importable by name.
        args: picklable arguments after the `RankInfo`.
        devices: number of processes.
        options: ``deadline``, ``grace``, ``check``, as in `tests.harness.pool.Pool.run`.

    Returns:
        One outcome per rank.
    """
    return run_job(function, devices, *args, **options)


@remembered
def one_process(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(info, *args)`` returns on one process: made once in a test session, a copy for every caller."""
    return run_trainers(function, *args, devices=1)[0].value
