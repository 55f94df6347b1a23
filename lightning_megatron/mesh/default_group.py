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
own threads, which run the backward of the user's collectives on GPUs, see what the step sees, and so do those that run
parts of a step (:func:`of_this_thread`). torch keeps the default group in one object for the process and has no seam
for this, so that object answers by thread while a step runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d


class _Stepping(NamedTuple):
    """Threads that run a step, and the group that is the default one for them."""

    threads: set[int]
    group: dist.ProcessGroup


class _WorldByThread(distributed_c10d._World):
    """torch's record of process groups, whose default group is another one for the threads of a step."""

    stepping: _Stepping | None = None
    _default_pg: Any

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        """The replicas' group in the step's threads and in autograd's, the world in all others."""
        stepping = self.stepping
        if stepping is not None:
            here = threading.get_ident() in stepping.threads
            if here or isinstance(threading.current_thread(), threading._DummyThread):
                return stepping.group
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
        self._before: list[_Stepping | None] = []

    def __enter__(self) -> None:
        self._before.append(_now())
        _set(_Stepping({threading.get_ident()}, self._group))

    def __exit__(self, *_: object) -> None:
        _set(self._before.pop())


def of_this_thread() -> Callable[[], AbstractContextManager[None]]:
    """A context for other threads, in which they see the default group that this one sees now."""
    stepping = _now()
    if stepping is None or threading.get_ident() not in stepping.threads:
        return nullcontext
    return partial(_joining, stepping)


@contextmanager
def _joining(stepping: _Stepping) -> Iterator[None]:
    stepping.threads.add(threading.get_ident())
    try:
        yield
    finally:
        stepping.threads.discard(threading.get_ident())


@contextmanager
def whole_world() -> Iterator[None]:
    """While inside, the default group is that of all ranks, in a step too."""
    stepping = _now()
    _set(None)
    try:
        yield
    finally:
        _set(stepping)


def _now() -> _Stepping | None:
    return getattr(distributed_c10d._world, "stepping", None)


def _set(stepping: _Stepping | None) -> None:
    world: Any = distributed_c10d._world
    world.__class__ = _WorldByThread
    world.stepping = stepping
    if stepping is None:
        world.__class__ = distributed_c10d._World
