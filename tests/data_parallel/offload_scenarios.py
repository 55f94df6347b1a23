"""Training with optimizers in host memory."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_megatron.data_parallel.buckets.host_memory import HostMemory
from lightning_megatron.data_parallel.update.hosted_steps import UpdateJob
from lightning_megatron.mesh.autograd import in_backward
from lightning_megatron.mesh.messages import host_link as link
from lightning_megatron.strategy.options import offload_checks
from tests.data_parallel.sharing_scenarios import Setup, SharedTask, train
from tests.harness import RankInfo
from tests.parity.train import make_trainer


class SleepingLink(link.HostLink):
    """A device whose copies are through a while after they were started, on threads; it counts what is there.

    Args:
        seconds: of a copy.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.copies, self.together, self._running = seconds, 0, 0, 0
        self.in_backwards = 0
        self._lock = threading.Lock()

    def start(self, target: Tensor, source: Tensor) -> link.Copy:
        with self._lock:
            self.copies, self._running = self.copies + 1, self._running + 1
            self.in_backwards += in_backward()
            self.together = max(self.together, self._running)
        return _Sleeping(self, target, source.clone())

    def copy(self, target: Tensor, source: Tensor) -> None:
        time.sleep(self.seconds)
        target.copy_(source)
        with self._lock:
            self._running -= 1


class _Sleeping(link.Copy):
    def __init__(self, owner: SleepingLink, target: Tensor, source: Tensor) -> None:
        target.fill_(float("nan"))  # whoever does not wait reads that
        self._thread = threading.Thread(target=owner.copy, args=(target, source.detach()))
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()


@dataclass(frozen=True)
class Around:
    """What happens around a run.

    Attributes:
        writes: weights change by hand between steps.
        sleeps: seconds of each copy to the device and back; 0 for none.
        fails: the second bucket's step fails.
        full: the disk is full.
        free: bytes of memory, or of the disk, that are free; ``None`` for what there is.
    """

    writes: bool = False
    sleeps: float = 0.0
    fails: bool = False
    full: bool = False
    free: int | None = None


USUAL = Around()


def offloaded(
    info: RankInfo, setup: Setup, resume: str | None = None, save: str | None = None, around: Around = USUAL
) -> dict[str, Any]:
    """As `train`; reports the host memory that was given, and copies, too.

    Args:
        info: this process.
        setup: of the run.
        resume: checkpoint to go on from.
        save: where to save one at the end.
        around: what happens to it.
    """
    counted = {"hosted": 0, "near": 0, "largest": 0, "steps": 0}
    near: dict[int, int] = {}
    empty, near_of, leave = HostMemory.empty, UpdateJob.bring, UpdateJob.leave
    path = SleepingLink(around.sleeps)

    def counting(self: HostMemory, elements: int, dtype: torch.dtype) -> Tensor:
        counted["hosted"] += elements * dtype.itemsize
        return empty(self, elements, dtype)

    def coming(self: UpdateJob, value: Tensor, device: torch.device) -> Tensor:
        near[id(self)] = near.get(id(self), 0) + value.numel()
        counted["near"] = max(counted["near"], sum(near.values()))
        counted["largest"] = max(counted["largest"], 3 * sum(b.placement.shard for b in self._buckets))
        return near_of(self, value, device)

    def leaving(self: UpdateJob) -> None:
        counted["steps"] += 1
        if around.fails and counted["steps"] == 2:
            raise ArithmeticError("as it was meant to")
        leave(self)
        near.pop(id(self), None)

    patches: list[Any] = [
        mock.patch.object(HostMemory, "empty", counting),
        mock.patch.object(UpdateJob, "bring", coming),
        mock.patch.object(UpdateJob, "leave", leaving),
    ]
    if around.sleeps:
        patches.append(mock.patch.object(link, "link_for", lambda device: path))
    if around.full:
        patches.append(mock.patch.object(os, "posix_fallocate", _no_space))
    if around.free is not None:
        patches.append(mock.patch.object(offload_checks, "free_bytes", lambda folder: around.free))
    if around.writes:
        patches.append(mock.patch.object(SharedTask, "on_train_batch_end", _write, create=True))
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        if around.fails:
            return {"failed": _failed(info, setup), **counted}
        trained = train(info, setup, resume, save)
    return {**trained, **counted, **{name: getattr(path, name) for name in ("copies", "together", "in_backwards")}}


def _failed(info: RankInfo, setup: Setup) -> bool:
    """Whether a module whose optimizer has failed finds its own parameters in the groups again."""
    from lightning_megatron import MegatronStrategy

    trainer = make_trainer(info, MegatronStrategy(*setup.layout or (), **setup.strategy), max_epochs=1)
    module = SharedTask()
    try:
        trainer.fit(module)
    except ArithmeticError:
        held = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
        return held == {id(p) for p in module.parameters()}
    return False


def _write(task: SharedTask, *_: Any) -> None:
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.clamp_(-0.05, 0.05)


def _no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
