"""Sending activations and gradients between stages.

Sends never block: a blocking send in the steady state of 1F1B, where two neighbours send to each other at the same
time, deadlocks. A sent tensor is kept alive until its transfer is done. Receives may be posted ahead of use where the
backend matches messages by tag (gloo); NCCL matches by order alone, so there they are posted exactly where the
schedule says.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Transfer:
    """A receive in flight: call :meth:`wait` for its tensors."""

    def __init__(self, tensors: list[Tensor], works: list[Any]) -> None:
        self._tensors = tensors
        self._works = works

    def wait(self) -> list[Tensor]:
        """Block until every tensor has arrived (on a GPU: make the current stream wait) and return them."""
        for work in self._works:
            work.wait()
        self._works = []
        return self._tensors


class StageLinks:
    """Point-to-point transfers of one rank with the other stages of its pipeline.

    Args:
        group: the pipeline's process group.
        ranks: global ranks of the pipeline, first stage first.
        device: where tensors live.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
        self._group = group
        self._ranks = list(ranks)
        self._device = device
        self._pending: list[tuple[Any, Tensor]] = []
        self.posts_ahead = dist.get_backend(group) != "nccl"

    def send(self, stage: int, tensors: Sequence[Tensor], tag: int) -> None:
        """Start sending ``tensors`` to ``stage``."""
        self._reap()
        for tensor in tensors:
            data = tensor.detach().contiguous()
            work = dist.isend(data, self._ranks[stage], group=self._group, tag=tag)
            self._pending.append((work, data))

    def receive(self, stage: int, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], tag: int) -> Transfer:
        """Start receiving tensors of the given shapes and dtypes from ``stage``."""
        with torch.inference_mode(False):
            tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
        works = [dist.irecv(tensor, self._ranks[stage], group=self._group, tag=tag) for tensor in tensors]
        return Transfer(tensors, works)

    def send_object(self, stage: int, value: Any, tag: int) -> None:
        """Start sending a small Python object; its length goes first."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self.send(stage, [torch.tensor([data.numel()], device=self._device), data.to(self._device)], tag)

    def receive_object(self, stage: int, tag: int) -> Any:
        """Receive a small Python object sent by :meth:`send_object`."""
        (length,) = self.receive(stage, [((1,), torch.int64)], tag).wait()
        (data,) = self.receive(stage, [((int(length.item()),), torch.uint8)], tag).wait()
        return pickle.loads(data.cpu().numpy().tobytes())

    def finish(self) -> None:
        """Wait for all sends; called at the end of a step."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def _reap(self) -> None:
        while self._pending and self._pending[0][0].is_completed():
            self._pending.pop(0)[0].wait()
