"""Backwards of messages between replicas, which all ranks of a group run, or none does.

The loss of a replica may depend on less than that of another one: on a layer's output for some samples only, of which
it has none. Its backward would not come to the messages of that layer's experts, and the others would wait for it. So
the ranks tell each other, before a backward, which of the messages of its forward it will come to. What another rank's
comes to is a further root of this one's, with a gradient of zero::

    rank 0   loss ──▶ message 3 ──▶ message 2 ──▶ message 1          comes to 1 2 3
    rank 1   loss ──────────────────────────────▶ message 1          comes to 1
               └─ 0 ▶ message 3 ── 0 ▶ message 2 ── 0 ▶

Autograd runs what was computed last first, so the order is the same on both. What no rank's loss depends on has no
gradient, as in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh.autograd import graph_behind
from lightning_megatron.mesh.messages.collectives import Started, start_all_reduce


class JointBackwards:
    """Messages whose backwards the ranks of a group run together.

    Copies of a module share it, as it holds the group.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._noted: list[Tensor] | None = None
        self._told: Started | None = None

    def __deepcopy__(self, memo: Any) -> JointBackwards:
        return self

    @property
    def in_forward(self) -> bool:
        """True while a forward runs whose messages are noted, so that a backward is one inside of it."""
        return self._noted is not None

    def note(self, root: Tensor) -> None:
        """Note a message of a forward by an output of it, a number that nothing is computed from."""
        if self._noted is not None and root.requires_grad:
            self._noted.append(root)

    @contextmanager
    def noting(self) -> Iterator[list[Tensor]]:
        """Around a forward: gives its messages, in their order, the same on all ranks of the group."""
        before, self._noted = self._noted, []
        try:
            yield self._noted
        finally:
            self._noted = before

    def further_roots(self, noted: Sequence[Tensor], nodes: Iterable[Any]) -> list[Tensor]:
        """Messages that another rank's backward comes to, and this one's does not; collective over the group.

        A rank whose backward comes to all of them, as most do, says so and goes on.

        Args:
            noted: by the forward.
            nodes: of the graph, where this rank's backward begins.
        """
        if not noted:
            return []
        missing = {root.grad_fn: place for place, root in enumerate(noted)}
        for node in graph_behind(nodes):
            missing.pop(node, None)
            if not missing:
                break
        here = torch.ones(len(noted), dtype=torch.int32)
        here[list(missing.values())] = 0
        self._hear()
        anywhere, self._told = start_all_reduce(here.to(noted[0].device), self._group, keep=False, maximum=True)
        if not missing:
            return []
        self._hear()
        told = anywhere.tolist()
        return [noted[place] for place in missing.values() if told[place]]

    def _hear(self) -> None:
        """Wait for what the ranks have told each other last."""
        work, self._told = self._told, None
        if work is not None:
            work.wait()

    def joined(self, output: Any, noted: Sequence[Tensor]) -> Any:
        """``output`` of a step with a loss whose backward comes to all that others' do; collective over the group."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        node = loss.grad_fn if isinstance(loss, Tensor) else None
        roots = self.further_roots(noted, [node])
        if not roots or node is None:
            return output
        joined = _Joined.apply(loss, *roots)  # type: ignore[no-untyped-call]
        return {**output, "loss": joined} if isinstance(output, Mapping) else joined


class _Joined(torch.autograd.Function):
    """A loss, from which a backward goes on to further roots with gradients of zero."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *roots: Tensor) -> Tensor:
        ctx.save_for_backward(*roots)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(root) for root in ctx.saved_tensors)
