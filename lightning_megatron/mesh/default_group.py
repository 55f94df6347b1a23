"""Makes the data group the default group of ``torch.distributed`` inside the user's step.

User code written for one process per replica calls ``dist.all_reduce(x)``, ``dist.get_rank()`` or ``dist.all_gather``
without a group and means the replicas: ranks with the same part of the model and different samples. Over the whole
world such a call would count tensor-parallel ranks several times, and wait for pipeline stages that do not make it.
While the user's step and its backward run, the default group is therefore that of the replicas; between steps it is the
world::

    2 stages × 2 replicas       world      default group in the step
    stage 0                     2   3      [2, 3]   dist.get_rank() 0 and 1, of 2
    stage 1, which has the loss 0   1      [0, 1]   dist.get_rank() 0 and 1, of 2
"""

from __future__ import annotations

import torch.distributed as dist


class default_group:
    """Context in which ``group`` is the default group of ``torch.distributed``; reentrant.

    Args:
        group: process group of the replicas.
    """

    __slots__ = ("_before", "_group")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._before: list[dist.ProcessGroup | None] = []

    def __enter__(self) -> None:
        self._before.append(dist.group.WORLD)
        dist.group.WORLD = self._group

    def __exit__(self, *_: object) -> None:
        dist.group.WORLD = self._before.pop()
