"""Rows of tokens, sent to the ranks that hold their experts and back.

Every rank of an expert group has tokens of its own, and the router's choice for each; the experts are shared out in
blocks. Two ranks, four experts::

    rank 0   rows for 2 0 3 0     sorted  0 0 │ 2 3           rank 0 computes experts 0 1 on  0 0 │ 1
    rank 1   rows for 1 2 2 2     sorted  1   │ 2 2 2         rank 1 computes experts 2 3 on  2 3 │ 2 2 2

What comes back lies in the order of the rows that were sent. The weights of the router stay at the sender, and with
them the router's gradient. Nothing is dropped, and no rank waits for tokens that it does not get: one without rows
takes part with none, in the forward and in the backward.

Several ranks may hold a part of each expert. A row goes to all of them, and what comes back is added up::

    two parts    ranks 0 1 hold experts 0 1, ranks 2 3 experts 2 3; a row for expert 2 goes to ranks 2 and 3

Or all ranks get all tokens, and each computes its experts for them; see :mod:`gathering`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.experts.exchange.anchors import anchor_for, gradient_of, leave
from lightning_megatron.experts.exchange.folding import Folding
from lightning_megatron.experts.exchange.gathering import gather_rows, gathered_rows, scatter_rows
from lightning_megatron.experts.exchange.taking_part import Calls, Told
from lightning_megatron.mesh.messages.collectives import Started, wait_for
from lightning_megatron.mesh.messages.passed_on import start_all_to_all_rows

Compute = Callable[[Tensor, Tensor, Told], Tensor]
"""Gives a rank's experts' output for rows from all ranks, ``[m, width], [m] -> [m, other width]``.

The second are the local numbers of the rows' experts, the third what the ranks have told. m may be 0.
"""


class Owners:
    """Assigns experts to the ranks of an expert group: blocks of equal size, in order.

    Args:
        experts: how many there are.
        group: the ranks that hold them; their number divides that of the experts.
        calls: of all mixtures of a module; ``None`` for one that is alone.
        name: of the experts, for messages.
        folding: shares out rows among ranks that all have them; by default every rank has rows of its own.
        parts: how many ranks, neighbours, hold a part of each of the same experts.
        gathers: whether all ranks are to get all tokens, where a call gives tokens with their experts.

    Attributes:
        folding, gathers: the same.
        local: how many experts a rank holds, or parts of them.
        first: number of the first one on this rank.
        part: which part of its experts this rank holds.
    """

    def __init__(
        self,
        experts: int,
        group: dist.ProcessGroup,
        calls: Calls | None = None,
        name: str = "",
        folding: Folding | None = None,
        parts: int = 1,
        gathers: bool = False,
    ) -> None:
        self.folding, self._parts, self.gathers = folding or Folding(), parts, gathers
        self.experts, self.group, self._calls = experts, group, calls or Calls(group)
        self.local = experts * parts // group.size()
        self.first, self.part = group.rank() // parts * self.local, group.rank() % parts
        self._number, self._is_copy = self._calls.add(name, self.local), False
        self._latest: tuple[tuple[Tensor, ...], Compute]

    def __deepcopy__(self, memo: Any) -> Owners:
        """Those of a copy of the module, in the same group."""
        copied = copy.copy(self)
        copied._is_copy = True
        return copied

    def send(
        self,
        rows: Tensor,
        expert: Tensor,
        compute: Compute,
        called: Collection[int] = (),
        meanwhile: Callable[[], object] | None = None,
    ) -> Tensor:
        """The results of the experts of all ranks for this rank's rows; collective over the group, in the backward too.

        Args:
            rows: [n, width], where n may differ between ranks and be 0.
            expert: [n], the number of each row's expert; ``experts`` and above for none.
            compute: gives this rank's experts' output; see :data:`Compute`. It is kept, for calls of others.
            called: numbers of experts that are called, whether there are rows for them or not.
            meanwhile: is called while rows are on their way, and so is its backward.

        Returns:
            [n, other width], in the order of ``rows``; zeros for those without an expert.
        """
        self._count_copy()
        if self._parts > 1:
            sent = self._to_all_parts(rows, expert)
            found = self._send(*sent, compute, called, meanwhile)
            return found.unflatten(0, (self._parts, len(rows))).sum(0)
        return self._send(rows, expert, compute, called, meanwhile)

    def gather(self, hidden: Tensor, index: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """``Σ_k weights_tk · expert_index_tk(hidden_t)`` of this rank's tokens, of which all ranks get all; collective
        over the group, in the backward too.

        Args:
            hidden: [tokens, width], of which there may be other numbers on each rank, and none.
            index: [tokens, k] numbers of experts; ``experts`` and above for none.
            weights: [tokens, k].
            compute: gives this rank's experts' output, or its part of it; see :data:`Compute`. It is kept.
        """
        self._count_copy()
        counts = _counts(index.flatten(), self.experts).view(-1, self.local).repeat_interleave(self._parts, 0)
        told = self._calls.call(self._number, counts, torch.zeros_like(counts), self, len(hidden))
        given = hidden, index, weights
        self._latest = tuple(each.detach()[:0].clone() for each in given), compute
        return self._gathered(*given, compute, told)

    def _gathered(self, hidden: Tensor, index: Tensor, weights: Tensor, compute: Compute, told: Told) -> Tensor:
        message = told.tokens, self.group, (self._calls, self._number)
        tokens, weighs = (gather_rows(each, *message) for each in (hidden, weights))
        local = (gathered_rows(index, tuple(told.tokens), self.group) - self.first).flatten()
        here = torch.where((local >= 0) & (local < self.local), local, self.local)
        order = here.argsort(stable=True)[: sum(told.of_experts)]
        token = order // index.shape[1]
        made = compute(tokens[token], local[order], told) * weighs.flatten()[order].unsqueeze(1)
        total = made.new_zeros(len(tokens), made.shape[1]).index_add(0, token, made)
        return scatter_rows(total, *message).to(hidden.dtype)

    def _count_copy(self) -> None:
        """Give a copy of a mixture a number of its own, when it is first called."""
        if self._is_copy:
            self._number, self._is_copy = self._calls.add_copy(self._number), False

    def _to_all_parts(self, rows: Tensor, expert: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for each part of their experts, ``[n, width], [n] -> [parts · n, width], [parts · n]``.

        Experts are counted by ranks then: with 2 of them on each of 4 ranks in 2 parts, parts of expert 3 are 5 and 7.
        """
        blocks, inside = expert // self.local, expert % self.local
        parts = torch.arange(self._parts, device=expert.device).unsqueeze(1)
        return rows.repeat(self._parts, 1), ((blocks * self._parts + parts) * self.local + inside).flatten()

    def _send(
        self,
        rows: Tensor,
        expert: Tensor,
        compute: Compute,
        called: Collection[int],
        meanwhile: Callable[[], object] | None,
    ) -> Tensor:
        order = torch.argsort(expert, stable=True)
        counts = _counts(expert, self.local * self.group.size()).view(-1, self.local)  # [ranks, experts of a rank]
        asked = torch.zeros(self.experts // self.local, 1, self.local, dtype=counts.dtype)
        asked.view(-1)[list(called)] = 1
        asked = asked.expand(-1, self._parts, -1).reshape(-1, self.local)
        told = self._calls.call(self._number, counts, asked.to(counts.device), self)
        self._latest = (rows.detach()[:0].clone(),), compute
        sent = order[: sum(told.outgoing)]
        back = self._exchange(rows[sent], told, compute, meanwhile)
        return back.new_zeros(len(rows), *back.shape[1:]).index_copy(0, sent, back)

    def answer(self, told: Told) -> None:
        """Take part in a call of the others without rows."""
        given, compute = self._latest
        if self.gathers:
            hidden, index, weights = given
            self._gathered(hidden, index, weights, compute, told)
        else:
            self._exchange(given[0], told, compute)

    def _exchange(
        self, rows: Tensor, told: Told, compute: Compute, meanwhile: Callable[[], object] | None = None
    ) -> Tensor:
        """Send rows, sorted by their experts, to them and back."""
        arriving = told.rows[:, : self.local].reshape(-1)
        numbers = torch.arange(self.local, device=rows.device).repeat(self.group.size())
        message = _Message(told.outgoing, told.incoming, self._number, self._calls)
        started = _Started.apply(rows, anchor_for(rows), message)
        if meanwhile is not None:
            meanwhile()
        arrived = message.arrive(started, rows)
        found = compute(arrived, numbers.repeat_interleave(arriving, output_size=sum(told.incoming)), told)
        back = _Message(told.incoming, told.outgoing, self._number, self._calls)
        return back.arrive(_Started.apply(found, anchor_for(rows), back), rows)


def _counts(expert: Tensor, slots: int) -> Tensor:
    """How often each number below ``slots`` is in ``expert``, [slots]."""
    if expert.is_cuda:  # where `bincount` asks the device for the largest one
        within = expert.clamp(max=slots)
        return torch.zeros(slots + 1, dtype=torch.long, device=expert.device).scatter_add_(
            0, within, torch.ones_like(within)
        )[:slots]
    return torch.bincount(expert, minlength=slots)[:slots]


class _Message:
    """Rows under way between the ranks of a group.

    Args:
        outgoing: rows to each rank.
        incoming: rows from each rank.
        number: of the mixture whose they are.
        calls: of all mixtures.
    """

    def __init__(self, outgoing: list[int], incoming: list[int], number: int, calls: Calls) -> None:
        self._outgoing, self._incoming, self._number, self._calls = outgoing, incoming, number, calls
        self._under_way: list[tuple[Tensor, Tensor, Started]] = []
        self.sent_back: _Message

    @property
    def placeholder(self) -> int:
        """Number of the rows that come in the forward; of those that :class:`_Started` gives."""
        return sum(self._incoming)

    def back(self) -> _Message:
        """That of the gradients."""
        return _Message(self._incoming, self._outgoing, self._number, self._calls)

    def start(self, rows: Tensor) -> None:
        """Send rows."""
        self._under_way.append((rows, *start_all_to_all_rows(rows, self._outgoing, self._incoming, self._calls.group)))

    def wait(self) -> Tensor:
        """The rows that have come."""
        rows, arrived, work = self._under_way.pop()
        wait_for(work, "all_to_all", rows, self._calls.group)
        return arrived

    def arrive(self, started: Tensor, like: Tensor) -> Tensor:
        """The rows that have come, with gradients that go back; ``started`` is what :class:`_Started` gave."""
        rows, root = _Arrived.apply(started, anchor_for(like), self)
        self._calls.joint.note(root)
        return cast(Tensor, rows)

    def differentiate(self, like: Tensor) -> None:
        """Called before gradients are sent."""
        self._calls.differentiate(self._number, like.device)


class _Started(torch.autograd.Function):
    """Sends rows to the ranks of a group, for which :class:`_Arrived` waits; the other way round in the backward.

    Between the two, nothing stands for what will come. What runs there in the forward runs there in the backward too:
    autograd takes the latest first. The backward can be differentiated.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, message: _Message, places: int = -1) -> Tensor:
        ctx.message = message
        message.start(rows)
        places = message.placeholder if places < 0 else places
        return rows.new_empty(()).expand(places, *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.message.sent_back.arrive(grad, grad), None, None, None


class _Arrived(torch.autograd.Function):
    """Rows that have come, and a number that stands for them; see :class:`_Started`."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, anchor: Tensor, message: _Message) -> tuple[Tensor, Tensor]:
        ctx.message, ctx.places = message, len(started)
        return leave(ctx, message.wait(), anchor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        rows = gradient_of(ctx, grad)
        ctx.message.differentiate(rows)
        back = ctx.message.sent_back = ctx.message.back()
        return _Started.apply(rows.contiguous(), anchor_for(rows), back, ctx.places), None, None
