"""Makes the data group the default group of ``torch.distributed`` inside the user's step.

User code written for one process per replica calls ``dist.all_reduce(x)``, ``dist.get_rank()`` or ``dist.all_gather``
without a group and means the replicas: ranks with the same part of the model and different samples. Over the whole
world such a call would count tensor-parallel ranks several times, and wait for pipeline stages that do not make it.
While the user's step and its backward run, the default group is therefore that of the replicas; between steps it is the
world::

    2 stages × 2 replicas       world      default group in the step
    stage 0                     2   3      [2, 3]   dist.get_rank() 0 and 1, of 2
    stage 1, which has the loss 0   1      [0, 1]   dist.get_rank() 0 and 1, of 2

Other threads still see the world: a checkpoint that is saved in the background talks to all ranks meanwhile. Autograd's
own threads, which run the backward of the user's collectives on GPUs, see what the step sees. torch keeps the default
group in one object for the process and has no seam for this, so that object answers by thread while a step runs.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


class _WorldByThread(distributed_c10d._World):
    """torch's record of process groups, whose default group is another one for the thread of a step."""

    stepping: tuple[int, dist.ProcessGroup] | None = None
    _default_pg: Any

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        """The replicas' group in the step's thread and in autograd's, the world in all others."""
        stepping = self.stepping
        if stepping is not None:
            thread, group = stepping
            if threading.get_ident() == thread or isinstance(threading.current_thread(), threading._DummyThread):
                return group
        world: dist.ProcessGroup | None = self._default_pg
        return world

    @default_pg.setter
    def default_pg(self, value: dist.ProcessGroup | None) -> None:
        self._default_pg = value


class default_group:
    """Context in which ``group`` is the default group of ``torch.distributed`` for this thread; reentrant.

    Args:
        group: process group of the replicas.
    """

    __slots__ = ("_before", "_group")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._before: list[tuple[int, dist.ProcessGroup] | None] = []

    def __enter__(self) -> None:
        world: Any = distributed_c10d._world
        if type(world) is distributed_c10d._World:
            world.__class__ = _WorldByThread
        self._before.append(world.stepping)
        world.stepping = threading.get_ident(), self._group

    def __exit__(self, *_: object) -> None:
        world: Any = distributed_c10d._world
        world.stepping = before = self._before.pop()
        if before is None:
            world.__class__ = distributed_c10d._World
