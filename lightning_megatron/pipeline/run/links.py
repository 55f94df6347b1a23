"""Sending activations and gradients between stages.

Sends do not block: a blocking send in the steady state of 1F1B, where two neighbours send to each other at the same
time, deadlocks. A sent tensor is kept alive until its transfer is done; only when two more have been sent down the same
link is it waited for, so that a fast stage does not pile up what a slow one has yet to fetch (gloo tells that a send is
done to nobody but who waits for it). The order of all transfers stands even if every send waited. Receives may be
posted ahead of use where the backend matches messages by tag (gloo); NCCL matches by order alone, so there they are
posted exactly where the schedule says. Between CPU processes of one host, messages go through memory that both have
mapped (:mod:`~lightning_megatron.mesh.messages.host_peers`).

Tensor-parallel ranks of one stage hold equal boundary tensors. Sending all of them t times would carry the same numbers
over t links, so each rank sends its t-th and the receivers put the whole together (SC21, section 4.1)::

    stage 0, tensor 0   [a b] ──a──▶ stage 1, tensor 0   a ──┐ all-gather ┌──▶ [a b]
    stage 0, tensor 1   [a b] ──b──▶ stage 1, tensor 1   b ──┘            └──▶ [a b]
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.messages import objects
from lightning_megatron.mesh.messages.collectives import raw_all_gather
from lightning_megatron.mesh.messages.transport import Message, Transport

_NOTHING = nullcontext()
_NOTES = 1 << 20  # tag of messages that no schedule lists


@dataclass(frozen=True)
class LinkOptions:
    """How tensors travel between stages.

    Attributes:
        scatter_from: size in bytes from which a replicated tensor is sent in parts; below it, latency dominates.
        under_way: sends of one tag to one stage that may be in flight at once.
        through_memory: whether CPU processes on one host pass messages through shared memory instead of the backend.
    """

    scatter_from: int = 64 * 1024
    under_way: int = 2
    through_memory: bool = True


USUAL_LINKS = LinkOptions()


class Transfer:
    """A receive in flight: call :meth:`wait` for its tensors.

    Args:
        tensors: buffers.
        messages: their receives.
        whole: shape of the first tensor if its buffer is for this rank's part of it only.
        replicas: the group whose parts make the whole.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        messages: list[Message],
        whole: tuple[int, ...] | None = None,
        replicas: Any = None,
    ) -> None:
        self._tensors = tensors
        self._messages = messages
        self._whole = whole
        self._replicas = replicas

    def wait(self) -> list[Tensor]:
        """Block until every tensor has arrived (on a GPU: make the current stream wait) and return them."""
        for message in self._messages:
            message.wait()
        self._messages = []
        if self._whole is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._tensors[0] = raw_all_gather(self._tensors[0], 0, self._replicas).view(self._whole)
            self._whole = None
        return self._tensors


class StageLinks:
    """Point-to-point transfers of one rank with the other stages of its pipeline.

    Sends never block. Messages between two ranks with the same tag arrive in the order in which they were sent. Where
    the ranks of a tensor group hold equal boundary tensors, each sends a 1/t part and the receivers gather the parts
    among themselves (SC21, section 4.1).

    Args:
        group: the pipeline's process group.
        ranks: global ranks of the pipeline, first stage first; with a single one there is nobody to send to.
        device: where tensors live.
        replicas: group of ranks of the same stage that hold equal boundary tensors, if any.
        options: sizes and limits of what travels.

    Attributes:
        posts_ahead: whether receives may be posted ahead of use.
        on_cpu: whether tensors live on the CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        device: torch.device,
        replicas: dist.ProcessGroup | None = None,
        options: LinkOptions = USUAL_LINKS,
    ) -> None:
        self._replicas = replicas
        self._peers = [dist.get_group_rank(group, rank) for rank in ranks]
        self._device = device
        self._options = options
        self._pending: dict[tuple[int, int], deque[list[Message]]] = {}
        self.on_cpu = device.type == "cpu"
        over_gloo = self.on_cpu and dist.get_backend(group) == "gloo" and len(self._peers) > 1
        self._transport = Transport(group, through_memory=over_gloo and options.through_memory)
        self.posts_ahead = self._transport.posts_ahead

    def send(self, stage: int, tensors: Sequence[Tensor], tag: int, *, scatter: bool = False) -> None:
        """Start sending ``tensors`` to ``stage``; with ``scatter``, only this replica's part of the first."""
        pending = self._pending.setdefault((stage, tag), deque())
        while len(pending) >= self._options.under_way:
            _wait_for(pending.popleft())
        messages: list[Message] = []
        for index, tensor in enumerate(tensors):
            data = tensor.detach().contiguous()
            replicas = self._replicas_of(data.shape, data.dtype) if scatter and index == 0 else None
            if replicas is not None:
                data = data.view(replicas.size(), -1)[replicas.rank()]
            messages.append(self._transport.send(data, self._peers[stage], tag))
        pending.append(messages)

    def _replicas_of(self, shape: Sequence[int], dtype: torch.dtype) -> dist.ProcessGroup | None:
        """The ranks among which a boundary tensor is sent in equal parts; ``None`` where it travels whole."""
        elements = math.prod(shape)
        if self._replicas is None or elements * dtype.itemsize < max(1, self._options.scatter_from):
            return None
        return self._replicas if elements % self._replicas.size() == 0 else None

    def receive(
        self, stage: int, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], tag: int, *, scatter: bool = False
    ) -> Transfer:
        """Start receiving tensors of the given shapes and dtypes from ``stage``; ``scatter`` as the sender has it."""
        whole = None
        replicas = self._replicas_of(*shapes[0]) if scatter and shapes else None
        if replicas is not None:
            whole, dtype = shapes[0]
            shapes = [((math.prod(whole) // replicas.size(),), dtype), *shapes[1:]]
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING:
            tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
        messages = [self._transport.receive(tensor, self._peers[stage], tag) for tensor in tensors]
        return Transfer(tensors, messages, whole, replicas)

    def send_object(self, stage: int, value: Any, tag: int) -> None:
        """Start sending a small Python object; its length goes first."""
        data = objects.encode(value)
        self.send(stage, [torch.tensor([data.numel()], device=self._device), data.to(self._device)], tag)

    def receive_object(self, stage: int, tag: int) -> Any:
        """Receive a small Python object sent by :meth:`send_object`."""
        (length,) = self.receive(stage, [((1,), torch.int64)], tag).wait()
        (data,) = self.receive(stage, [((int(length.item()),), torch.uint8)], tag).wait()
        return objects.decode(data)

    def compare_notes(self, stage: int, mine: list[float]) -> list[float] | None:
        """Send some numbers to the next stage, and receive those of the previous one.

        Called ahead of a step's first activation, for which every stage but the first waits anyhow.

        Args:
            stage: this rank's stage.
            mine: numbers; equally many on every stage. The last one is told as its sum over the stages so far.

        Returns:
            The numbers of the stage before; ``None`` on the first.
        """
        heard: list[float] | None = None
        if stage > 0:
            (before,) = self.receive(stage - 1, [((len(mine),), torch.float64)], _NOTES).wait()
            heard = list(before.tolist())
        if stage < len(self._peers) - 1:
            told = mine if heard is None else [*mine[:-1], mine[-1] + heard[-1]]
            self.send(stage + 1, [torch.tensor(told, dtype=torch.float64, device=self._device)], _NOTES)
        return heard

    def hear_last(self, stage: int, mine: float) -> float:
        """A number of the last stage, on every stage.

        Args:
            stage: this rank's stage.
            mine: the number, which is told on the last stage only.
        """
        last = len(self._peers) - 1
        if stage < last:
            (told,) = self.receive(last, [((1,), torch.float64)], _NOTES).wait()
            return float(told)
        for other in range(last):
            self.send(other, [torch.tensor([mine], dtype=torch.float64, device=self._device)], _NOTES)
        return mine

    def finish(self) -> None:
        """Wait for all sends; called at the end of a step."""
        for pending in self._pending.values():
            while pending:
                _wait_for(pending.popleft())


def _wait_for(messages: list[Message]) -> None:
    for message in messages:
        message.wait()
