"""Which GPU should be which rank: the cheapest placement of (pipeline, data, tensor) over islands with slow links
between.

A cluster is seldom one even network. Nodes sit in racks, racks in buildings, and two InfiniBand clusters may be
joined by Ethernet (Holmes, arXiv 2312.03549). Tensor parallelism wants the fastest links, data parallelism the next,
and the pipeline, which moves least, may cross the slowest. ``assign`` finds the placement whose slowest traffic costs
least, and ``traffic`` counts the bytes that any placement puts on every level, so that the two can be checked against
each other.

Machines form a tree of levels. With two islands of two nodes of two GPUs::

    level 2   cluster          [0 1 2 3 4 5 6 7]        slowest
    level 1   island        [0 1 2 3]   [4 5 6 7]
    level 0   node          [0 1] [2 3] [4 5] [6 7]     fastest

Two GPUs talk at the lowest level that holds both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_megatron.mesh.layout import Layout
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape

_SWAPPED = 32
"""Largest grid that is improved by exchanging ranks."""
_STARTS = 6
"""Placements from which such exchanges start."""

Rank = tuple[int, int, int]
"""Coordinates (pipeline stage, data, tensor)."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of links.

    Args:
        name: for reports, such as ``node`` or ``island``.
        sizes: GPUs in each group of this level, in the order of the GPUs; groups of a higher level hold whole groups of
            a lower one.
        bandwidth: bytes/s per GPU between members of a group that share no lower group.
    """

    name: str
    sizes: tuple[int, ...]
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Topology:
    """Levels from the fastest to the slowest; the last holds all GPUs in one group.

    Args:
        levels: the levels.
        speeds: relative speed of every GPU, where they differ.

    Raises:
        ValueError: levels differ in their number of GPUs, a group is cut by a higher level, or the last has several.
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
        """For every GPU the index of its group on each level, fastest level first."""
        columns = [[index for index, size in enumerate(level.sizes) for _ in range(size)] for level in self.levels]
        return list(zip(*columns, strict=True))

    @classmethod
    def even(cls, counts: Sequence[int], bandwidths: Sequence[float], names: Sequence[str] | None = None) -> Topology:
        """A regular tree.

        Args:
            counts: members of a group on each level, fastest first: [8, 4, 2] is 2 islands of 4 nodes of 8 GPUs.
            bandwidths: bytes/s per GPU on each level.
            names: level names; None means node, island, cluster and so on.
        """
        total = math.prod(counts)
        names = names or ["node", "island", "cluster", "site", "region"][: len(counts)]
        levels, size = [], 1
        for count, bandwidth, name in zip(counts, bandwidths, names, strict=True):
            size *= count
            levels.append(Level(name, (size,) * (total // size), bandwidth))
        return cls(tuple(levels))


@dataclass(frozen=True, slots=True)
class Volumes:
    """Bytes that one step moves on each axis.

    Args:
        tensor: per rank and step, around a ring over its tensor group.
        data: per rank and step, around a ring over its data group.
        pipeline: per rank and step, to the same rank of each neighbouring stage.
    """

    tensor: float
    data: float
    pipeline: float


def step_volumes(shape: ModelShape, recipe: Recipe) -> Volumes:
    """Bytes that one step of a recipe moves per rank on each axis."""
    boundary = recipe.element * recipe.micro_batch * shape.seq * shape.hidden
    layers = shape.layers / recipe.pipeline
    collectives = 4.0 + (2.0 if recipe.recompute == "full" else 0.0)
    ring = 2.0 * (recipe.tensor - 1) / recipe.tensor
    parameters = shape.parameters / recipe.tensor / recipe.pipeline
    return Volumes(
        tensor=collectives * ring * boundary * layers * recipe.micro_batches,
        data=(recipe.bytes_per_gradient + recipe.element) * parameters * (recipe.data - 1) / recipe.data,
        pipeline=2.0 * recipe.chunks * boundary / recipe.tensor * recipe.micro_batches,
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Axis sizes of the grid."""

    pipeline: int
    data: int
    tensor: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pipeline * self.data * self.tensor

    def ranks(self) -> list[Rank]:
        """All coordinates, tensor varying fastest, then data, then pipeline."""
        return list(itertools.product(range(self.pipeline), range(self.data), range(self.tensor)))


Nesting = tuple[tuple[str, int], ...]
"""Axis parts from the innermost to the outermost, such as (("tensor", 2), ("data", 2), ("pipeline", 2), ("data",
2))."""

Assignment = dict[Rank, int]
"""GPU of every rank."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A chosen assignment with its cost in seconds, and the bytes that cross each level."""

    assignment: Assignment
    seconds: float
    bytes_by_level: dict[str, float]
    order: tuple[str, ...]


def transfers(sizes: Sizes, volumes: Volumes) -> Iterator[tuple[Rank, Rank, float]]:
    """Every pair of ranks that exchange data in a step, and the bytes between them: rings and stage neighbours."""
    for p, d, t in sizes.ranks():
        if sizes.tensor > 1:
            yield (p, d, t), (p, d, (t + 1) % sizes.tensor), volumes.tensor
        if sizes.data > 1:
            yield (p, d, t), (p, (d + 1) % sizes.data, t), volumes.data
        if p + 1 < sizes.pipeline:
            yield (p, d, t), (p + 1, d, t), volumes.pipeline


def level_between(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """The fastest level on which two GPUs, given by their paths, are in one group."""
    return next(index for index, (a, b) in enumerate(zip(left, right, strict=True)) if a == b)


def traffic(assignment: Assignment, topology: Topology, sizes: Sizes, volumes: Volumes) -> dict[str, float]:
    """Bytes per step on each level's links under an assignment."""
    paths = topology.paths()
    found = {level.name: 0.0 for level in topology.levels}
    for left, right, size in transfers(sizes, volumes):
        level = level_between(paths[assignment[left]], paths[assignment[right]])
        found[topology.levels[level].name] += size
    return found


def cost(assignment: Assignment, topology: Topology, sizes: Sizes, volumes: Volumes) -> float:
    """Seconds that all transfers of a step take if each level carries its bytes one GPU's link at a time, per GPU."""
    carried = traffic(assignment, topology, sizes, volumes)
    return sum(carried[level.name] / level.bandwidth for level in topology.levels) / sizes.world


def assign(topology: Topology, sizes: Sizes, volumes: Volumes, *, anchored: bool = False) -> Placement:
    """The cheapest placement of the grid on the GPUs.

    Candidates walk the grid and the GPUs side by side: the grid's axes in every order of nesting, each axis possibly
    cut into an inner and an outer part (four data ranks in a node, two islands of them), and islands of unequal size
    in every order. Small grids are then improved by exchanging pairs of ranks. On small cases the result equals the
    best of all permutations (see the tests).

    Args:
        topology: the machine.
        sizes: the grid.
        volumes: bytes that a step moves.
        anchored: only placements with the first GPU on the first or the last stage, as :func:`rank_numbers` needs.

    Raises:
        ValueError: the grid has another number of ranks than there are GPUs.
    """
    if sizes.world != topology.gpus:
        raise ValueError(
            f"the grid of {sizes.pipeline} x {sizes.data} x {sizes.tensor} = {sizes.world} ranks does not fill "
            f"{topology.gpus} GPUs; change one of the parallel sizes"
        )
    found: list[tuple[float, Nesting, Assignment]] = []
    for order in nestings(sizes):
        for gpus in _gpu_orders(topology):
            assignment = dict(zip(walk(sizes, order), gpus, strict=True))
            seconds = cost(assignment, topology, sizes, volumes)
            found.append((seconds, order, assignment))
    found.sort(key=lambda item: item[0])
    if sizes.world <= _SWAPPED:
        better = [(*_swapped(item[2], topology, sizes, volumes), item[1]) for item in found[:_STARTS]]
        found += [(seconds, order, assignment) for seconds, assignment, order in better]
    usable = [item for item in found if not anchored or _is_anchored(item[2], sizes)]
    least = min(item[0] for item in usable)
    best = next(item for item in usable if item[0] <= least * (1 + 1e-9))
    carried = traffic(best[2], topology, sizes, volumes)
    return Placement(best[2], best[0], carried, tuple(f"{axis}{size}" for axis, size in best[1]))


def _is_anchored(assignment: Assignment, sizes: Sizes) -> bool:
    """Whether GPU 0 is on the first or the last stage."""
    return next(rank for rank, gpu in assignment.items() if gpu == 0)[0] in (0, sizes.pipeline - 1)


def rank_numbers(placement: Placement, layout: Layout) -> list[int]:
    """Global rank of every GPU under a placement, such that the first GPU is rank 0.

    Rank 0 has the loss and the first place on every other axis. Rings look the same from each of their places and a
    pipeline the same from both ends, so the grid is turned until the first GPU is there; the bytes on every link stay.

    Args:
        placement: from :func:`assign`, anchored.
        layout: the same grid, which numbers ranks.

    Returns:
        A permutation of the ranks, indexed by GPU.

    Raises:
        ValueError: the first GPU is in the middle of the pipeline.
    """
    stage, data, tensor = next(rank for rank, gpu in placement.assignment.items() if gpu == 0)
    home = layout.coordinates(0).pipeline
    if stage not in (0, layout.pipeline - 1):
        raise ValueError(f"the first GPU is on stage {stage}; place with `assign(..., anchored=True)`")
    numbers = [0] * layout.world_size
    for (p, d, t), gpu in placement.assignment.items():
        turned = p if stage == home else layout.pipeline - 1 - p
        numbers[gpu] = layout.rank(tensor=(t - tensor) % layout.tensor, data=(d - data) % layout.data, pipeline=turned)
    return numbers


def stage_speeds(topology: Topology, numbers: Sequence[int], layout: Layout) -> tuple[float, ...] | None:
    """Speed of every stage: that of its slowest GPU; None where all GPUs are alike.

    Args:
        topology: the machine.
        numbers: rank of every GPU.
        layout: the grid.
    """
    if topology.speeds is None or len(set(topology.speeds)) == 1:
        return None
    slowest = [float("inf")] * layout.pipeline
    for gpu, rank in enumerate(numbers):
        stage = layout.coordinates(rank).pipeline
        slowest[stage] = min(slowest[stage], topology.speeds[gpu])
    return tuple(slowest)


def _swapped(assignment: Assignment, topology: Topology, sizes: Sizes, volumes: Volumes) -> tuple[float, Assignment]:
    """Exchange the GPUs of two ranks while that lowers the cost; for grids that do not nest into the islands."""
    current, seconds = dict(assignment), cost(assignment, topology, sizes, volumes)
    pairs = list(itertools.combinations(current, 2))
    improved = True
    while improved:
        improved = False
        for left, right in pairs:
            current[left], current[right] = current[right], current[left]
            tried = cost(current, topology, sizes, volumes)
            if tried < seconds * (1 - 1e-9):
                seconds, improved = tried, True
            else:
                current[left], current[right] = current[right], current[left]
    return seconds, current


def nestings(sizes: Sizes) -> list[Nesting]:
    """All orders of the axes in which at most one axis is cut into two parts, without repetitions."""
    whole = [
        (axis, size) for axis, size in (("tensor", sizes.tensor), ("data", sizes.data), ("pipeline", sizes.pipeline))
    ]
    whole = [(axis, size) for axis, size in whole if size > 1]
    found: dict[Nesting, None] = {}
    for parts in [whole, *_cuts(whole)]:
        for order in itertools.permutations(parts):
            if all(a[0] != b[0] for a, b in itertools.pairwise(order)):
                found[order] = None
    return list(found)


def _cuts(whole: Sequence[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    """The axes with one of them cut into two factors."""
    for index, (axis, size) in enumerate(whole):
        for inner in range(2, size):
            if size % inner == 0:
                yield [*whole[:index], (axis, inner), (axis, size // inner), *whole[index + 1 :]]


def walk(sizes: Sizes, order: Nesting) -> list[Rank]:
    """Coordinates of the grid in the order of a nesting, innermost part fastest.

    ``walk(Sizes(2, 1, 2), (("tensor", 2), ("pipeline", 2)))`` is (0,0,0), (0,0,1), (1,0,0), (1,0,1).
    """
    axes = ("pipeline", "data", "tensor")
    ranks = []
    for digits in itertools.product(*(range(size) for _, size in reversed(order))):
        place = dict.fromkeys(axes, 0)
        scale = dict.fromkeys(axes, 1)
        for (axis, size), digit in zip(order, reversed(digits), strict=True):
            place[axis] += digit * scale[axis]
            scale[axis] *= size
        ranks.append((place["pipeline"], place["data"], place["tensor"]))
    return ranks


def _gpu_orders(topology: Topology) -> Iterator[list[int]]:
    """Orders of the GPUs: islands of the second-slowest level in every order where they are few and unequal."""
    if len(topology.levels) < 2:
        yield list(range(topology.gpus))
        return
    islands = topology.levels[-2].sizes
    starts = [0, *itertools.accumulate(islands)]
    blocks = [list(range(start, start + size)) for start, size in zip(starts, islands, strict=False)]
    orders: Iterable[tuple[int, ...]] = [tuple(range(len(blocks)))]
    if len(set(islands)) > 1 and len(blocks) <= 6:
        orders = itertools.permutations(range(len(blocks)))
    for order in orders:
        yield [gpu for index in order for gpu in blocks[index]]


def uneven_split(layers: int, speeds: Sequence[float]) -> list[int]:
    """Layers per pipeline stage for stages of unequal speed, so that the slowest stage is as fast as it can be.

    Args:
        layers: layers to share out.
        speeds: relative speed of each stage's GPUs.

    Returns:
        Layers per stage, each at least 1; [6, 2] for 8 layers on speeds [3, 1].

    Raises:
        ValueError: fewer layers than stages, or a speed that is not positive.
    """
    if layers < len(speeds):
        raise ValueError(f"`layers={layers}` is less than the {len(speeds)} stages; use fewer pipeline stages")
    if min(speeds) <= 0:
        raise ValueError(f"`speeds={list(speeds)}` must all be positive")
    split = [1] * len(speeds)
    for _ in range(layers - len(speeds)):
        slowest_after = [(split[stage] + 1) / speeds[stage] for stage in range(len(speeds))]
        split[slowest_after.index(min(slowest_after))] += 1
    return split
