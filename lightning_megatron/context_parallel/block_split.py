"""Tokens of which each tensor rank holds one block of its context rank's: context and sequence parallelism together.

Between the regions that tensor ranks share, sequence parallelism (Korthikanti et al., arXiv 2205.05198) leaves a rank
with a block of the tokens that would be there. 16 tokens over two context ranks of two tensor ranks each::

    token                  0 1 2 3 4 5 6 7 8 9 ...        15
    context 0              #######                  ########        both of its tensor ranks, inside of a region
    context 0, tensor 0    #######                                  between regions
    context 0, tensor 1                             ########

A column-parallel layer gathers the blocks (`BlockSplit.together`), a row-parallel layer scatters its sum into them
(`TokenSplit.in_blocks`). In between every function treats tokens alike: that is tried before layers are split so, and
one that asks for other ranks' tokens all the same is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_megatron.context_parallel.token_split import Run, Scope, TokenSplit


@dataclass(frozen=True)
class BlockSplit(TokenSplit):
    """A dim of ``length`` tokens, cut over context ranks, of whose rows this tensor rank holds one block.

    ``runs`` are those that tensor ranks of this rank's place hold, of each context rank.

    Attributes:
        blocks: the tensor ranks.
        whole: the split of the context ranks; ``None`` where this dim is no longer made of equal blocks of it.
    """

    blocks: dist.ProcessGroup | None = None
    whole: TokenSplit | None = None

    def together(self) -> TokenSplit:
        """The split of which this one's parts are blocks.

        Raises:
            RuntimeError: a stretch of tokens, or tokens after another dim, which no longer are equal blocks.
        """
        if self.whole is None:
            raise RuntimeError(
                f"a linear layer that is split over tensor ranks was given a stretch of tokens, or tokens of which "
                f"others lie in between (`flatten(0, 1)` of [batch, tokens, features]), under "
                f"{_GIVEN.format(self.group.size())}. {_TURN_OFF}"
            )
        return self.whole

    def in_blocks(self, group: dist.ProcessGroup) -> TokenSplit:
        """Not defined: blocks are not split again."""
        raise RuntimeError(
            f"tokens were split into blocks twice, under {_GIVEN.format(self.group.size())}. {_TURN_OFF}"
        )

    def check_mixes(self) -> None:
        """Refuse a function that reads the tokens of other ranks.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "a function between the split parts of layers reads other tokens than its own, or adds up over tokens, "
            f"under {_GIVEN.format(self.group.size())}. {_TURN_OFF}"
        )

    def join(self, local: Tensor, dim: int) -> Tensor:
        """Refused: see `check_mixes`."""
        self.check_mixes()
        return local

    def summed(self, partial: Tensor) -> Tensor:
        """Refused: see `check_mixes`."""
        self.check_mixes()
        return partial

    def sliced(self, start: int, stop: int) -> tuple[TokenSplit, int, int]:
        """As that of a `TokenSplit`."""
        split, first, count = super().sliced(start, stop)
        return BlockSplit(split.group, split.length, split.runs, split.scope, None, self.blocks), first, count

    def flattened(self, before: int, after: int) -> TokenSplit:
        """As that of a `TokenSplit`."""
        split = super().flattened(before, after)
        whole = None if self.whole is None or before != 1 else self.whole.flattened(before, after)
        return BlockSplit(split.group, split.length, split.runs, split.scope, (before, self, after), self.blocks, whole)

    @property
    def described(self) -> Hashable:
        """Description for a process of another stage that has the same place among the tensor ranks.

        Raises:
            RuntimeError: a stretch of tokens goes from stage to stage.
        """
        return ("blocks", self.together().described)


_GIVEN = "`sequence_parallel=True` with `context_parallel_size={}`"
_TURN_OFF = "Use `sequence_parallel=False`."


def in_blocks(split: TokenSplit, group: dist.ProcessGroup) -> BlockSplit:
    """The split whose parts are blocks of the parts of ``split``.

    Raises:
        RuntimeError: the rows of a context rank are no multiple of the tensor ranks.
    """
    if split.folded is not None:
        before, tokens, after = split.folded
        found = in_blocks(tokens, group).flattened(before, after)
        assert isinstance(found, BlockSplit)
        found.together()  # refuses what would not be blocks
        return found
    runs = tuple(_block(own, group.rank(), group.size()) for own in split.runs)
    return BlockSplit(split.group, split.length, runs, split.scope, None, group, split)


def from_described(
    described: Any, group: dist.ProcessGroup, scope: Scope, blocks: dist.ProcessGroup | None
) -> TokenSplit:
    """The split that another stage has described, over this process's ranks."""
    if blocks is None or described[0] != "blocks":
        return TokenSplit.from_described(described, group, scope)
    return in_blocks(TokenSplit.from_described(described[1], group, scope), blocks)


def _block(runs: Sequence[Run], rank: int, size: int) -> tuple[Run, ...]:
    """The ``rank``-th of ``size`` equal blocks of the rows of ``runs``, one after another."""
    rows = sum(stop - start for start, stop in runs)
    if rows % size:
        raise RuntimeError(f"{rows} rows cannot be shared evenly by {size} tensor ranks")
    first, last = rank * rows // size, (rank + 1) * rows // size
    found, behind = [], 0
    for start, stop in runs:
        low, high = max(first, behind), min(last, behind + stop - start)
        if low < high:
            found.append((start + low - behind, start + high - behind))
        behind += stop - start
    return tuple(found)
