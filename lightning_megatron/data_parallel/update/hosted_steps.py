"""Steps an optimizer on weights and state in host memory, bucket by bucket.

::

    bucket        0            1            2            3            (every second one on the device: k = 2)
    link          g0, w1 s1    g2, w3 s3 in, w1 s1 out   w3 s3 out
    processor     step 0       step 2
    device                     step 1                    step 3

Gradients g of a bucket travel during the backward, or, where copies of them are not there, while the bucket before it
steps. A bucket that steps on the device brings its weights w and state s there, while the one before it leaves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.data_parallel.buckets.bucket import Bucket
from lightning_megatron.data_parallel.buckets.host_memory import HostMemory
from lightning_megatron.data_parallel.update.sent_gradients import SentGradients
from lightning_megatron.data_parallel.update.substeps import SubSteps
from lightning_megatron.mesh.messages.host_link import Copy, HostLink


class HostedSteps:
    """The steps of one optimizer.

    Args:
        optimizer: the user's.
        memory: of this host.
        link: between it and the device.
        sent: gradients that are on their way already.
        apart: whether the optimizer may step bucket by bucket; else it steps on all at once, in host memory.
        stride: every how manieth bucket steps on the device; ``None`` for none.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        memory: HostMemory,
        link: HostLink,
        sent: SentGradients,
        *,
        apart: bool = True,
        stride: int | None = None,
    ) -> None:
        self.optimizer, self.memory, self.link, self.sent = optimizer, memory, link, sent
        self._apart, self._stride = apart, stride
        self._buffers: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        self._jobs: list[UpdateJob] = []
        self._substeps = SubSteps(optimizer)

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Let the groups of the optimizer hold what its own step is to update first.

        Args:
            buckets: with gradients; their pieces, and parameters that lie elsewhere, are in the groups.
        """
        held = [bucket for bucket in buckets if bucket.hosted]
        own = {id(piece.stepped) for bucket in held for piece in bucket.pieces.values()}
        groups = [list(group["params"]) for group in self.optimizer.param_groups]
        resident = [[p for p in members if id(p) not in own] for members in groups]
        runs = [[bucket] for bucket in held] if self._apart else [held]
        stride = self._stride if self._apart else None
        self._jobs = [
            UpdateJob(self, run, _among(groups, run), on_device=stride is not None and number % stride == 0)
            for number, run in enumerate(runs, 1)
        ]
        for run, job in zip(runs, self._jobs, strict=True):
            for bucket in run:
                self.sent.step_near(bucket, job.on_device)
        if self._apart or not self._jobs:
            self._jobs.insert(0, UpdateJob(self, [], resident))
        else:
            self._jobs[0].groups = groups
        self._jobs = [job for job in self._jobs if any(job.groups)] or [UpdateJob(self, [], resident)]
        self._substeps = SubSteps(self.optimizer)
        self._prepare(0)
        for group, members in zip(self.optimizer.param_groups, self._jobs[0].groups, strict=True):
            group["params"] = members

    def finish(self) -> None:
        """After the optimizer's own step: step on the rest."""
        jobs, leaving = self._jobs, list[UpdateJob]()
        jobs[0].leave()
        leaving.append(jobs[0])
        for index, job in enumerate(jobs[1:], 1):
            self._prepare(index)
            self._substeps.run(job.groups)
            job.leave()
            leaving.append(job)
            while len(leaving) > 1:
                leaving.pop(0).land()
        for job in leaving:
            job.land()
        self._jobs = []

    def drop(self) -> None:
        """Forget a step that failed; weights on the device are lost, and what the host had is the latest."""
        for job in self._jobs:
            job.drop()
        self._jobs = []

    def _prepare(self, index: int) -> None:
        """Let a job be ready, the one after it come, and the next that steps on the device, too."""
        jobs = self._jobs
        ahead = [job for job in jobs[index + 1 : index + 1 + (self._stride or 1)] if job.on_device][:1]
        for job in (jobs[index], *jobs[index + 1 : index + 2], *ahead):
            job.fetch()
        jobs[index].arrive()

    def buffer(self, dtype: torch.dtype, elements: int) -> Tensor:
        """Host memory for the gradients of a bucket."""
        free = self._buffers[dtype]
        fitting = next((index for index, found in enumerate(free) if found.numel() >= elements), None)
        if fitting is None:
            free.clear()
            return self.memory.empty(elements, dtype)
        return free.pop(fitting)

    def give_back(self, buffer: Tensor) -> None:
        """Let another bucket have the buffer."""
        self._buffers[buffer.dtype].append(buffer)


class UpdateJob:
    """A part of a step.

    Args:
        owner: whose it is.
        buckets: with pieces in host memory.
        groups: what to step on, by group.
        on_device: where.
    """

    def __init__(
        self, owner: HostedSteps, buckets: Sequence[Bucket], groups: list[list[nn.Parameter]], on_device: bool = False
    ) -> None:
        self._owner, self._buckets, self.groups, self.on_device = owner, buckets, groups, on_device
        self._fetched, self._copies = False, list[Copy]()
        self._buffers: list[Tensor] = []
        self._hosts: list[tuple[dict[str, Any] | nn.Parameter, str, Tensor]] = []

    def fetch(self) -> None:
        """Begin to bring gradients, and for a step on the device weights and state."""
        if self._fetched:
            return
        self._fetched = True
        for bucket in self._buckets:
            weights, gradients = bucket.master, bucket.own_gradients
            if self.on_device:
                gradients = gradients.to(weights.dtype)
                self._bring(bucket, weights, gradients.device)
            elif (sent := self._owner.sent.of(bucket)) is not None:
                gradients, copy = sent
                self._copies.append(copy)
            else:
                gradients = gradients.to(weights.dtype)
                buffer = self._owner.buffer(weights.dtype, gradients.numel())
                self._buffers.append(buffer)
                gradients, source = buffer[: gradients.numel()], gradients
                self._copies.append(self._owner.link.start(gradients, source))
            for piece in bucket.pieces.values():
                if piece.update.grad is not None:
                    piece.stepped.grad = piece.part.of(gradients).view(piece.stepped.shape)

    def _bring(self, bucket: Bucket, weights: Tensor, device: torch.device) -> None:
        near = self.bring(weights, device)
        options = {id(p): group for group in self._owner.optimizer.param_groups for p in group["params"]}
        for piece in bucket.pieces.values():
            stepped = piece.stepped
            self._hosts.append((stepped, "data", stepped.data))
            stepped.data = piece.part.of(near).view(stepped.shape)
            state = self._owner.optimizer.state.get(stepped, {})
            group = options.get(id(stepped), {})
            for name, value in state.items():
                if isinstance(value, Tensor) and (value.dim() or group.get("fused") or group.get("capturable")):
                    self._hosts.append((state, name, value))
                    state[name] = self.bring(value, device)

    def bring(self, value: Tensor, device: torch.device) -> Tensor:
        """Begin to copy ``value`` to the device; returns where it will be."""
        near = torch.empty_like(value, device=device)
        self._copies.append(self._owner.link.start(near, value))
        return near

    def arrive(self) -> None:
        """Wait for what was fetched."""
        for copy in self._copies:
            copy.wait()
        self._copies = []

    def leave(self) -> None:
        """After the step: let gradients go, and begin to take back what was brought."""
        self._release()
        for home, name, host in self._hosts:
            near = home.data if isinstance(home, nn.Parameter) else home[name]
            if near.shape == host.shape:
                self._copies.append(self._owner.link.start(host, near))
            self._put(home, name, host)
        self._hosts = []
        for piece in (piece for bucket in self._buckets for piece in bucket.pieces.values()):
            state = self._owner.optimizer.state.get(piece.stepped, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[name] = self._owner.memory.take(value)

    land = arrive

    def drop(self) -> None:
        """Put back what the host has."""
        self.arrive()
        self._release()
        for home, name, host in self._hosts:
            self._put(home, name, host)
        self._hosts = []

    @staticmethod
    def _put(home: dict[str, Any] | nn.Parameter, name: str, host: Tensor) -> None:
        if isinstance(home, nn.Parameter):
            home.data = host
        else:
            home[name] = host

    def _release(self) -> None:
        for piece in (piece for bucket in self._buckets for piece in bucket.pieces.values()):
            piece.stepped.grad = None
        for buffer in self._buffers:
            self._owner.give_back(buffer)
        self._buffers = []


def _among(groups: list[list[nn.Parameter]], buckets: Sequence[Bucket]) -> list[list[nn.Parameter]]:
    """The members of groups that lie in these buckets."""
    own = {id(piece.stepped) for bucket in buckets for piece in bucket.pieces.values()}
    return [[p for p in members if id(p) in own] for members in groups]
