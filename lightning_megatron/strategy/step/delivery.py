"""Sending the outcome of a step from the stage that computes the loss to the other stages of its pipeline.

Everything that a step leaves behind travels in one message: the loss and the logged values as numbers; new keys, what
the step returned and what it stored on the module after them, as bytes, where there are any.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.batches import map_tensors
from lightning_megatron.mesh.mesh import ParallelMesh
from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import Started, start_broadcast
from lightning_megatron.mesh.messages.exchange import exchanges
from lightning_megatron.strategy.logs.step_logs import LogKey, StepLogs
from lightning_megatron.strategy.step.step import Outcome

_HEADER = 6
_RESULTS = (1 << 20) + 1  # tag of messages that bring a step's outcome
_SHARED = _RESULTS + 1  # tag of numbers that a step in progress goes on with
_INLINE_VALUES = 60
_LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class OutcomeDelivery:
    """Makes one step's outcome equal along a pipeline.

    Args:
        mesh: the grid.
        device: where tensors live.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self._device = device
        self._group = mesh.group("pipeline_parallel")
        self._source = dist.get_group_rank(self._group, mesh.loss_rank)
        self._has_loss = mesh.rank == mesh.loss_rank
        self._sent: list[Started] = []
        self._expected: tuple[Tensor, Started] | None = None
        self._keys: list[LogKey] = []

    def expect(self) -> None:
        """Be ready for the outcome of the step that is about to run, so that it arrives while this rank is busy."""
        self._expected = None
        if self._has_loss:
            return
        header = self._new_header()
        if exchanges(header, self._group):
            self._expected = header, self._start(header)

    def settle(self) -> None:
        """Wait until the other stages have fetched what was sent to them: at the latest when the next step is sent."""
        sent, self._sent = self._sent, []
        for work in sent:
            work.wait()

    def share(self, value: Tensor) -> Tensor:
        """A number of the stage that computes the loss, on every stage; in the middle of a step.

        Args:
            value: scalar in float64; what other stages hand in is written over.
        """
        work = start_broadcast(value, self._source, self._group, _SHARED)
        if self._has_loss:
            self._sent.append(work)
        else:
            work.wait()
        return value

    def send(self, outcome: Outcome) -> None:
        """Start sending it to the other stages, which fetch it when they get there."""
        self.settle()
        rows = outcome.logs.rows.reshape(-1)
        loss = outcome.loss
        extra: dict[str, Any] = {}
        if outcome.logs.keys != self._keys:
            self._keys = outcome.logs.keys
            extra["keys"] = outcome.logs.keys
        left = {"output": outcome.output, "state": outcome.state or None, "batch": outcome.batch}
        left = {name: value for name, value in left.items() if value is not None}
        extra |= map_tensors(left, lambda tensor: tensor.detach().cpu())
        blob = objects.encode(extra or None)
        header = self._new_header()
        dtype = _LOSS_DTYPES.index(loss.dtype) if loss is not None else -1
        numbers = [blob.numel(), rows.numel(), dtype, outcome.stop, outcome.differ, outcome.unseen]
        header[:_HEADER] = torch.tensor(numbers, dtype=torch.float64)
        values = torch.cat([(loss if loss is not None else rows.new_tensor(float("nan"))).reshape(1).double(), rows])
        inline = values[:_INLINE_VALUES]
        header[_HEADER : _HEADER + inline.numel()] = inline
        self._pass_on(header)
        if values.numel() > _INLINE_VALUES:
            self._pass_on(values[_INLINE_VALUES:].contiguous())
        if blob.numel():
            self._pass_on(blob.to(self._device))

    def receive(self) -> Outcome:
        """The outcome, from the stage that computes the loss."""
        expected, self._expected = self._expected, None
        if expected is not None:
            header, under_way = expected
            under_way.wait()
        else:
            header = self._new_header()
            self._pass_on(header)
        size, count, dtype, *flags = (int(entry) for entry in header[:_HEADER].tolist())
        count += 1
        values = header[_HEADER : _HEADER + min(count, _INLINE_VALUES)]
        if count > _INLINE_VALUES:
            rest = torch.zeros(count - _INLINE_VALUES, dtype=torch.float64, device=self._device)
            self._pass_on(rest)
            values = torch.cat([values, rest])
        extra: dict[str, Any] = {}
        if size:
            blob = torch.zeros(size, dtype=torch.uint8, device=self._device)
            self._pass_on(blob)
            extra = objects.decode(blob)
        self._keys = extra.get("keys", self._keys)
        left = {name: extra.get(name) for name in ("output", "state", "batch")}
        output, state, batch = map_tensors(left, lambda tensor: tensor.to(self._device)).values()
        loss = values[0].to(_LOSS_DTYPES[dtype]) if dtype >= 0 else None
        logs = StepLogs(self._keys, values[1:].view(-1, 3))
        stop, differ, unseen = map(bool, flags)
        return Outcome(logs, loss, output, state or [], stop, differ, unseen, batch)

    def _new_header(self) -> Tensor:
        return torch.zeros(_HEADER + _INLINE_VALUES, dtype=torch.float64, device=self._device)

    def _start(self, tensor: Tensor) -> Started:
        return start_broadcast(tensor, self._source, self._group, _RESULTS)

    def _pass_on(self, tensor: Tensor) -> None:
        work = self._start(tensor)
        if self._has_loss:
            self._sent.append(work)
        else:
            work.wait()
