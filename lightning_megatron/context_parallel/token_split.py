"""The tokens of a sequence that each context rank holds; conversion between the ranks' rows and whole tensors.

A dim of ``length`` tokens is cut into *runs*, stretches of neighbouring tokens; a rank's rows are its runs, ascending.
Causal attention gives late tokens more work than early ones, so each rank gets one run of either kind. 11 tokens over
two ranks, balanced so::

    token   0 1 2 3 4 5 6 7 8 9 10
    rank 0  ###                ####        runs (0, 2) and (8, 11)
    rank 1      ###### ####                runs (2, 5) and (5, 8)

Any length can be cut: runs differ by at most one token, and may be empty.

Every rank computes the loss of the whole batch, and its backward starts there. Each conversion is differentiated by
its true adjoint, so that the gradients of a parameter, *averaged* over the ranks, are those of one process, however
much of the code ran on rows and however much on whole tensors:

==========  =================================  ==================================  ==================
name        forward                            backward                            layout
==========  =================================  ==================================  ==================
``join``    all-gather, in order of tokens     reduce-scatter                      rows -> whole
``take``    own rows                           zeros for the other rows            whole -> rows
``summed``  all-reduce                         all-reduce                          partial -> whole
``shared``  identity                           identity                            whole -> read by rows
==========  =================================  ==================================  ==================

(The conversions of `SplitDim` assume instead that a gradient of a whole tensor is whole on every rank.)
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_megatron.layers.whole import SplitDim
from lightning_megatron.mesh.autograd import first_order
from lightning_megatron.mesh.messages.collectives import raw_all_gather, raw_all_reduce, raw_reduce_scatter

Run = tuple[int, int]
"""First token, and the one past the last."""


def zigzag_runs(length: int, ranks: int) -> tuple[tuple[Run, ...], ...]:
    """Runs of each rank: rank r of c gets the pieces r and 2c - 1 - r of 2c, of nearly equal size."""
    cuts = [length * index // (2 * ranks) for index in range(2 * ranks + 1)]
    pieces = list(itertools.pairwise(cuts))
    return tuple(joined([pieces[rank], pieces[2 * ranks - 1 - rank]]) for rank in range(ranks))


def block_runs(length: int, ranks: int) -> tuple[tuple[Run, ...], ...]:
    """Runs of each rank: rank r of c gets the r-th stretch of tokens."""
    cuts = [length * index // ranks for index in range(ranks + 1)]
    return tuple(joined([run]) for run in itertools.pairwise(cuts))


BALANCES = {"zigzag": zigzag_runs, "block": block_runs}
"""Ways to deal tokens out, by name."""


def runs_in_units(balance: str, length: int, ranks: int, unit: int) -> tuple[tuple[Run, ...], ...]:
    """Runs of each rank, in which the tokens of every ``unit`` of neighbours stay together."""
    if length % unit:
        raise ValueError(
            f"The sequence length {length} is not divisible by tensor_parallel_size={unit}, which "
            f"sequence_parallel=True needs: pad or cut to {(length // unit + 1) * unit} or {length // unit * unit}, or "
            "set sequence_parallel=False."
        )
    dealt = BALANCES[balance](length // unit, ranks)
    return tuple(tuple((start * unit, stop * unit) for start, stop in runs) for runs in dealt)


def joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs without empty ones; neighbours become one."""
    found: list[Run] = []
    for start, stop in runs:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


class Scope:
    """State that the splits of one module share.

    Attributes:
        running: whether a step of the user's runs; gradients asked for in it are refused.
        cut: whether tokens were split in it.
        method: how attention meets the other ranks' keys: ``"gather"``, ``"ring"`` or ``"ulysses"``.
        attended: number of attention calls, by method.
        masks: number of masks that are rules, as ``""``, and of functions that needed one whole, by name.
        rows: of masks that several layers are given, those of this rank's queries, which are copies.
        levels: ranks among which ``"ulysses"`` shares the heads, and those of the ring between such; ``None`` for one
            level.
        shared_out: makes the split whose parts are blocks of another's, over a group (sequence parallelism).
        attention: what calls of attention are handed to instead, with the rule for them, if anything.
    """

    running: bool = False
    cut: bool = False
    attention: Callable[..., Any] | None = None

    def __init__(
        self, method: str = "gather", levels: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    ) -> None:
        self.method, self.levels = method, levels
        self.attended: Counter[str] = Counter()
        self.masks: Counter[str] = Counter()
        self.rows: Any = WeakTensorKeyDictionary()
        self.shared_out: Callable[[TokenSplit, dist.ProcessGroup], TokenSplit] = _not_shared_out


def _not_shared_out(split: TokenSplit, group: dist.ProcessGroup) -> TokenSplit:
    raise RuntimeError(f"tokens are not split into blocks over {group.size()} tensor ranks here")


@dataclass(frozen=True)
class TokenSplit(SplitDim):
    """A dim of ``length`` tokens (or of products of tokens and what was flattened with them), cut over ``group``.

    Attributes:
        group: the context ranks.
        length: global size of the dim.
        runs: of each rank, ascending.
        scope: of the module's steps.
        folded: where the dim was flattened out of several: ``(before, split, after)``, the sizes flattened in front of
            the tokens and after them, and the split of the tokens themselves.
    """

    runs: tuple[tuple[Run, ...], ...] = ()
    scope: Scope = field(default_factory=Scope, compare=False)
    folded: tuple[int, TokenSplit, int] | None = None

    @property
    def counts(self) -> list[int]:
        """Rows of each rank."""
        return [sum(stop - start for start, stop in runs) for runs in self.runs]

    @property
    def mine(self) -> tuple[Run, ...]:
        """Runs of this rank."""
        return self.runs[self.group.rank()]

    def order(self, device: torch.device) -> Tensor:
        """Index of each token among the rows of all ranks, one rank after another: [length]."""
        return torch.argsort(_index_of(self.runs, str(device)))

    def span(self, block: int) -> tuple[int, int]:
        """Not defined: the rows of a rank are several runs."""
        raise NotImplementedError("the rows of a rank are no single span; ask for `runs`.")

    def held(self, local: Tensor, dim: int) -> Tensor:
        """All rows of this rank, as there is no padding."""
        return local

    def pad(self, held: Tensor, dim: int, block: int) -> Tensor:
        """The rows as they are."""
        return held

    def join(self, local: Tensor, dim: int) -> Tensor:
        """The whole tensor in order of tokens, on every rank: [.., rows, ..] -> [.., length, ..]; a collective."""
        if local.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, _Join.apply(local, self, dim))
        return self.gathered(local, dim)

    def take(self, whole: Tensor, dim: int, block: int) -> Tensor:
        """This rank's rows of a whole tensor: [.., length, ..] -> [.., rows, ..]; no communication."""
        return self.take_held(whole, dim)

    def take_held(self, whole: Tensor, dim: int, block: int = 0) -> Tensor:
        """The same; a view where the rows are one run.

        No rank saves a tensor for the backward, for whose sake a checkpoint around it would run again on that rank
        alone, and wait for the others.
        """
        parts = [whole.narrow(dim, start, stop - start) for start, stop in self.mine or ((0, 0),)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def summed(self, partial: Tensor) -> Tensor:
        """Sum over the ranks, on every rank."""
        return cast(Tensor, _Summed.apply(partial, self.group, self.scope))

    def shared(self, whole: Tensor) -> Tensor:
        """A tensor that every rank has and combines with its own rows."""
        return whole

    def sliced(self, start: int, stop: int) -> tuple[TokenSplit, int, int]:
        """The split of ``[.., start:stop, ..]``, the first of this rank's rows in it, and how many of them are."""
        runs = tuple(
            joined([(max(a, start) - start, max(min(b, stop), max(a, start)) - start) for a, b in own if b > start])
            for own in self.runs
        )
        first = sum(max(0, min(b, start) - a) for a, b in self.mine)
        split = TokenSplit(self.group, max(0, stop - start), runs, self.scope)
        return split, first, split.counts[self.group.rank()]

    def flattened(self, before: int, after: int) -> TokenSplit:
        """The split of a dim made of ``before`` × tokens × ``after``."""
        shape = before, self.length, after
        runs = tuple(_flat_runs(own, shape) for own in self.runs)
        return TokenSplit(self.group, before * self.length * after, runs, self.scope, (before, self, after))

    @property
    def causal_balance(self) -> float:
        """The most work of a rank under a causal mask, divided by the mean: 1 where it is shared evenly."""
        work = [sum((stop - start) * (start + stop + 1) // 2 for start, stop in runs) for runs in self.runs]
        return max(work) * len(work) / max(1, sum(work))

    @property
    def described(self) -> Hashable:
        """Description from which a process of another stage rebuilds it."""
        if self.folded is None:
            return self.length, self.runs, None
        before, split, after = self.folded
        return self.length, self.runs, (before, split.described, after)

    @classmethod
    def from_described(cls, described: Any, group: dist.ProcessGroup, scope: Scope) -> TokenSplit:
        """The split that was described, over this process's context ranks."""
        length, runs, folded = described
        if folded is not None:
            folded = folded[0], cls.from_described(folded[1], group, scope), folded[2]
        return cls(group, length, runs, scope, folded)

    def in_blocks(self, group: dist.ProcessGroup) -> TokenSplit:
        """The same where each rank of ``group`` holds one block of this rank's rows; see `.block_split`."""
        return self.scope.shared_out(self, group)

    def check_mixes(self) -> None:
        """Nothing to refuse: a function may read the tokens of other ranks."""

    def together(self) -> TokenSplit:
        """Not made of blocks: what is gathered over tensor ranks must have been split over them."""
        raise RuntimeError("tokens that are not split into blocks were given to a layer that gathers them")

    def refuse_bypass(self, shape: Sequence[int]) -> None:
        """Refuse a function whose gradient would not be known.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"a tensor of shape {tuple(shape)}, whose tokens are split over {self.group.size()} ranks "
            "(`context_parallel_size`), was given to code that torch's functions do not see: a custom "
            "`autograd.Function`, `torch.utils.checkpoint(use_reentrant=True)`, `torch.func`, `torch.jit` or code "
            "in C++. Its gradient would be wrong. Use torch's own functions there, "
            "`torch.utils.checkpoint(use_reentrant=False)`, or `context_parallel_size=1`."
        )

    def gathered(self, local: Tensor, dim: int) -> Tensor:
        """The tokens of all ranks along ``dim``, in their order; a collective: [.., held, ..] -> [.., length, ..]."""
        counts = self.counts
        most = max(counts)
        if local.dtype == torch.bool:  # which not every backend can send
            return self.gathered(local.to(torch.uint8), dim).to(torch.bool)
        rows = local.movedim(dim, 0)
        if rows.shape[0] < most:
            rows = torch.cat([rows, rows.new_zeros((most - rows.shape[0], *rows.shape[1:]))])
        found = raw_all_gather(rows, 0, self.group)
        places = _places(self.runs, str(local.device))
        return found.index_select(0, places).movedim(0, dim).contiguous()

    def scattered(self, grad: Tensor, dim: int) -> Tensor:
        """The sum over the ranks, for the tokens held here; a collective: [.., length, ..] -> [.., held, ..]."""
        if grad.dtype in (torch.bfloat16, torch.float16):  # added up wide, rounded once
            return self.scattered(grad.float(), dim).to(grad.dtype)
        counts, grad = self.counts, grad.movedim(dim, 0)
        out = grad.new_zeros((len(counts) * max(counts), *grad.shape[1:]))
        out.index_copy_(0, _places(self.runs, str(grad.device)), grad)
        mine = raw_reduce_scatter(out, 0, self.group)[: counts[self.group.rank()]]
        return mine.movedim(0, dim).contiguous()


def in_two_levels(
    split: TokenSplit, inner: dist.ProcessGroup, outer: dist.ProcessGroup
) -> tuple[TokenSplit, TokenSplit]:
    """The tokens of this rank's node, cut over its ranks, and all tokens, cut over nodes.

    Four ranks in nodes of two, with 8 tokens in zigzag order: rank 0 has (0, 1) and (7, 8), rank 1 has (1, 2) and
    (6, 7). Of the four tokens of their node these are (0, 1) and (3, 4), and (1, 3); the node has (0, 2) and (6, 8).

    Args:
        split: over the ranks of all nodes, one node after another.
        inner: the ranks of this node.
        outer: the ranks in this one's place in every node.
    """
    size = inner.size()
    nodes = [split.runs[first : first + size] for first in range(0, len(split.runs), size)]
    whole = tuple(joined(sorted(run for own in node for run in own)) for node in nodes)
    mine = nodes[split.group.rank() // size]
    places, behind = [list[Run]() for _ in mine], 0
    for start, stop, rank in sorted((*run, rank) for rank, own in enumerate(mine) for run in own):
        places[rank].append((behind, behind + stop - start))
        behind += stop - start
    within = TokenSplit(inner, behind, tuple(map(joined, places)), split.scope)
    return within, TokenSplit(outer, split.length, whole, split.scope)


def _flat_runs(runs: Sequence[Run], shape: tuple[int, int, int]) -> tuple[Run, ...]:
    before, length, after = shape
    return joined(
        [((i * length + start) * after, (i * length + stop) * after) for i in range(before) for start, stop in runs]
    )


@functools.lru_cache(maxsize=256)
def _index_of(runs: tuple[tuple[Run, ...], ...], device: str) -> Tensor:
    """Tokens of several ranks, one after another."""
    parts = [torch.arange(start, stop, device=device) for own in runs for start, stop in own]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long, device=device)


@functools.lru_cache(maxsize=256)
def _places(runs: tuple[tuple[Run, ...], ...], device: str) -> Tensor:
    """Index of each token among the rows of all ranks, padded to the longest rank's: [length]."""
    counts = [sum(stop - start for start, stop in own) for own in runs]
    most, found = max(counts), torch.empty(sum(counts), dtype=torch.long)
    for rank, own in enumerate(runs):
        index = _index_of((own,), "cpu")
        found[index] = rank * most + torch.arange(len(index))
    return found.to(device)


def after_the_step(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a custom autograd function between ranks, whose ``ctx.scope`` is that of the split.

    Returns:
        A backward that raises ``RuntimeError`` for gradients that the user's step asks for itself, and for gradients of
        gradients: a rank knows its tokens' part of them only.
    """
    checked = first_order(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if ctx.scope.running:
            raise RuntimeError(
                "a gradient was taken inside the step (`torch.autograd.grad` or `.backward()`), where a rank knows "
                "that of its own tokens only; return the loss, and use `context_parallel_size=1` for penalties on "
                "gradients."
            )
        return checked(ctx, *gradients)

    return run


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, split: TokenSplit, dim: int) -> Tensor:
        ctx.split, ctx.dim, ctx.scope = split, dim, split.scope
        return split.gathered(local, dim)

    @staticmethod
    @after_the_step
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.split.scattered(grad, ctx.dim), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup, scope: Scope) -> Tensor:
        ctx.group, ctx.scope = group, scope
        return raw_all_reduce(partial, group)

    @staticmethod
    @after_the_step
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return raw_all_reduce(grad, ctx.group), None, None
