"""The links of a cluster, as a tree of levels.

With two islands of two nodes of two GPUs::

    level 2   cluster          [0 1 2 3 4 5 6 7]        slowest
    level 1   island        [0 1 2 3]   [4 5 6 7]
    level 0   node          [0 1] [2 3] [4 5] [6 7]     fastest

Two GPUs communicate over the lowest level that contains both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Level:
    """One level of links.

    Args:
        name: for reports, such as ``node`` or ``island``.
        sizes: number of GPUs in each group of this level, in the order of the GPUs; a group of a higher level consists
            of whole groups of the lower one.
        bandwidth: bytes/s per GPU between members of a group that share no lower group.
    """

    name: str
    sizes: tuple[int, ...]
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Topology:
    """Tree of links between GPUs.

    Args:
        levels: from the fastest to the slowest; the last has one group of all GPUs.
        speeds: relative speed of every GPU, if they differ.

    Raises:
        ValueError: levels differ in their number of GPUs, a higher level cuts a group, the last level has several
            groups, or ``speeds`` are not one positive number per GPU.
    """

    levels: tuple[Level, ...]
    speeds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        totals = {level.name: sum(level.sizes) for level in self.levels}
        if not totals or len(set(totals.values())) != 1:
            raise ValueError(f"levels have different numbers of GPUs: {totals}; make their sizes add up to the same")
        if len(self.levels[-1].sizes) != 1:
            raise ValueError(f"the last level {self.levels[-1].name!r} has several groups; add one that joins them")
        for lower, upper in itertools.pairwise(self.levels):
            if not set(itertools.accumulate(upper.sizes)) <= set(itertools.accumulate(lower.sizes)):
                raise ValueError(f"groups of {upper.name!r} cut groups of {lower.name!r}; correct the sizes of one")
        if self.speeds is not None and (len(self.speeds) != self.gpus or min(self.speeds) <= 0):
            raise ValueError(f"`speeds` must be {self.gpus} positive numbers, one per GPU; got {self.speeds}")

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return sum(self.levels[0].sizes)

    def paths(self) -> list[tuple[int, ...]]:
        """Per GPU, the indices of its groups on all levels, fastest level first."""
        columns = [[index for index, size in enumerate(level.sizes) for _ in range(size)] for level in self.levels]
        return list(zip(*columns, strict=True))

    @classmethod
    def even(cls, counts: Sequence[int], bandwidths: Sequence[float], names: Sequence[str] | None = None) -> Topology:
        """A regular tree.

        Args:
            counts: branching factor of each level, fastest first: [8, 4, 2] is 2 islands of 4 nodes of 8 GPUs.
            bandwidths: bytes/s per GPU on each level.
            names: of the levels; None means node, island, cluster, site, region.
        """
        total = math.prod(counts)
        names = names or ["node", "island", "cluster", "site", "region"][: len(counts)]
        levels, size = [], 1
        for count, bandwidth, name in zip(counts, bandwidths, names, strict=True):
            size *= count
            levels.append(Level(name, (size,) * (total // size), bandwidth))
        return cls(tuple(levels))
