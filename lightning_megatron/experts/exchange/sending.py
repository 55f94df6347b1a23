"""Rows of tokens, sent to the ranks that hold their experts and back.

Every rank of an expert group has tokens of its own, and the router's choice for each; the experts are shared out in
blocks. Two ranks, four experts::

    rank 0   rows for 2 0 3 0     sorted  0 0 │ 2 3           rank 0 computes experts 0 1 on  0 0 │ 1
    rank 1   rows for 1 2 2 2     sorted  1   │ 2 2 2         rank 1 computes experts 2 3 on  2 3 │ 2 2 2

What comes back lies in the order of the rows that were sent. The weights of the router stay at the sender, and with
them the router's gradient. Nothing is dropped, and no rank waits for tokens that it does not get: one without rows
takes part with none, in the forward and in the backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.experts.exchange.folding import Folding
from lightning_megatron.experts.exchange.taking_part import Calls, Told
from lightning_megatron.mesh.messages.passed_on import raw_all_to_all_rows

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Gives a rank's experts' output for rows from all ranks, ``[m, width], [m], [experts here] -> [m, other width]``.

The second are the local numbers of the rows' experts, the third tells which experts any rank has called. m may be 0.
"""


class Owners:
    """Which rank of an expert group holds which experts: blocks of equal size, in order.

    Args:
        experts: how many there are.
        group: the ranks that hold them; their number divides that of the experts.
        calls: of all mixtures of a module; ``None`` for one that is alone.
        name: of the experts, for messages.
        folding: shares out rows among ranks that all have them; by default every rank has rows of its own.

    Attributes:
        folding: the same.
        local: how many experts a rank holds.
        first: number of the first one on this rank.
    """

    def __init__(
        self,
        experts: int,
        group: dist.ProcessGroup,
        calls: Calls | None = None,
        name: str = "",
        folding: Folding | None = None,
    ) -> None:
        self.folding = folding or Folding()
        self.experts, self.group, self._calls = experts, group, calls or Calls(group)
        self.local = experts // group.size()
        self.first = group.rank() * self.local
        self._number, self._is_copy = self._calls.add(name, self.local), False
        self._latest: tuple[Tensor, Compute]

    def __deepcopy__(self, memo: Any) -> Owners:
        """Those of a copy of the module, in the same group."""
        copied = copy.copy(self)
        copied._is_copy = True
        return copied

    def send(self, rows: Tensor, expert: Tensor, compute: Compute, called: Collection[int] = ()) -> Tensor:
        """What the experts of all ranks make of this rank's rows; collective over the group, in the backward too.

        Args:
            rows: [n, width], where n may differ between ranks and be 0.
            expert: [n], the number of each row's expert.
            compute: gives this rank's experts' output; see :data:`Compute`. It is kept, for calls of others.
            called: numbers of experts that are called, whether there are rows for them or not.

        Returns:
            [n, other width], in the order of ``rows``.
        """
        if self._is_copy:
            self._number, self._is_copy = self._calls.add_copy(self._number), False
        order = torch.argsort(expert, stable=True)
        counts = torch.bincount(expert, minlength=self.experts).view(-1, self.local)  # [ranks, experts of a rank]
        asked = torch.zeros(self.experts, dtype=counts.dtype)
        asked[list(called)] = 1
        told = self._calls.call(self._number, counts, asked.to(counts.device).view(-1, self.local), self)
        self._latest = rows.detach()[:0].clone(), compute
        back = self._exchange(rows[order], told, counts.sum(1).tolist(), compute)
        return back.new_empty(back.shape).index_copy(0, order, back)

    def answer(self, told: Told) -> None:
        """Take part in a call of the others without rows."""
        rows, compute = self._latest
        self._exchange(rows, told, [0] * self.group.size(), compute)

    def _exchange(self, rows: Tensor, told: Told, outgoing: list[int], compute: Compute) -> Tensor:
        """Send rows, sorted by their experts, to them and back."""
        arriving = told.rows[:, : self.local]
        numbers = torch.arange(self.local, device=rows.device).repeat(self.group.size())
        arrived = _Sent.apply(rows, _anchor(rows), outgoing, told.incoming, self.group)
        found = compute(arrived, numbers.repeat_interleave(arriving.reshape(-1)), told.called[: self.local])
        return _Sent.apply(found, _anchor(rows), told.incoming, outgoing, self.group)  # type: ignore[no-any-return]


def _anchor(rows: Tensor) -> Tensor:
    """What makes a message part of every rank's graph, or of none's: whether rows have gradients may differ."""
    return torch.zeros((), device=rows.device, requires_grad=torch.is_grad_enabled())


class _Sent(torch.autograd.Function):
    """Rows sent to the ranks of a group; their gradients are sent back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, anchor: Tensor, outgoing: list[int], incoming: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.message = outgoing, incoming, group
        return raw_all_to_all_rows(rows, outgoing, incoming, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        outgoing, incoming, group = ctx.message
        return raw_all_to_all_rows(grad, incoming, outgoing, group), None, None, None, None
