"""Assigns ranks to GPUs: the cheapest placement of (pipeline, data, tensor) on islands joined by slow links.

The links of a cluster are seldom equally fast: nodes are grouped in racks and buildings, and two InfiniBand clusters
may be joined by Ethernet (Holmes, arXiv 2312.03549). Tensor parallelism needs the fastest links, then data parallelism;
the pipeline, which sends the fewest bytes, may cross the slowest. ``assign`` finds the placement whose transfers take
the least time. ``traffic`` counts the bytes that a placement sends over each level, as an independent check.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_megatron.mesh.layout import Layout
from lightning_megatron.planner.cost.mixture import sent_bytes
from lightning_megatron.planner.model.levels import Level as Level
from lightning_megatron.planner.model.levels import Topology as Topology
from lightning_megatron.planner.model.recipe import Recipe
from lightning_megatron.planner.model.shape import ModelShape

_SWAPPED = 32
"""Largest grid, in ranks, that is improved by exchanging pairs of ranks."""
_STARTS = 6
"""Number of placements from which such exchanges start."""

Rank = tuple[int, int, int]
"""Coordinates (pipeline stage, data, tensor)."""


@dataclass(frozen=True, slots=True)
class Volumes:
    """Bytes that one rank sends in a step on each axis.

    Args:
        tensor: to the next rank of a ring over its tensor group.
        data: to the next rank of a ring over its data group.
        pipeline: between it and the corresponding rank of a neighbouring stage.
    """

    tensor: float
    data: float
    pipeline: float


def step_volumes(shape: ModelShape, recipe: Recipe) -> Volumes:
    """Bytes that one rank sends in a step of a recipe on each axis.

    Experts are shared out over neighbours, tensor ranks before replicas. Of the rows that a rank sends, those for ranks
    of its own replica count on the tensor axis, the others on the data axis.

    Example:
        Over 2 tensor ranks and 2 replicas with ``expert=4``, a third of the rows goes to the other tensor rank.
    """
    boundary = recipe.element * recipe.micro_batch * shape.seq * shape.hidden
    layers = shape.layers / recipe.pipeline
    collectives = 4.0 + (2.0 if recipe.recompute == "full" else 0.0)
    ring = 2.0 * (recipe.tensor - 1) / recipe.tensor
    experts = shape.mixtures * shape.experts * shape.expert_parameters / recipe.pipeline if recipe.expert > 1 else 0.0
    parameters = (shape.parameters / recipe.pipeline - experts) / recipe.tensor
    summed = parameters * (recipe.data - 1) / recipe.data
    summed += experts / recipe.expert * (recipe.expert_copies - 1) / recipe.expert_copies
    rows = near = 0.0
    if recipe.expert > 1:
        rows = sent_bytes(shape, recipe) * shape.mixtures / recipe.pipeline * recipe.micro_batches
        near = rows * (min(recipe.expert, recipe.tensor) - 1) / (recipe.expert - 1)
    return Volumes(
        tensor=collectives * ring * boundary * layers * recipe.micro_batches + near,
        data=(recipe.bytes_per_gradient + recipe.element) * summed + rows - near,
        pipeline=2.0 * recipe.chunks * boundary / recipe.tensor * recipe.micro_batches,
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the axes of the grid."""

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
"""Axes, or factors of axes, from the innermost to the outermost: (("tensor", 2), ("data", 2), ("pipeline", 2),
("data", 2))."""

Assignment = dict[Rank, int]
"""Rank -> GPU."""


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The result of :func:`assign`.

    Attributes:
        assignment: rank -> GPU.
        seconds: cost, see :func:`cost`.
        bytes_by_level: name of a level -> bytes per step over its links.
        order: nesting of the axes, innermost first, such as ``("tensor2", "data4")``.
    """

    assignment: Assignment
    seconds: float
    bytes_by_level: dict[str, float]
    order: tuple[str, ...]


def transfers(sizes: Sizes, volumes: Volumes) -> Iterator[tuple[Rank, Rank, float]]:
    """Yield every pair of ranks that communicate in a step (rings, neighbouring stages), and the bytes between them."""
    for p, d, t in sizes.ranks():
        if sizes.tensor > 1:
            yield (p, d, t), (p, d, (t + 1) % sizes.tensor), volumes.tensor
        if sizes.data > 1:
            yield (p, d, t), (p, (d + 1) % sizes.data, t), volumes.data
        if p + 1 < sizes.pipeline:
            yield (p, d, t), (p + 1, d, t), volumes.pipeline


def level_between(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Index of the fastest level on which two GPUs, given by their paths, are in one group."""
    return next(index for index, (a, b) in enumerate(zip(left, right, strict=True)) if a == b)


def traffic(assignment: Assignment, topology: Topology, sizes: Sizes, volumes: Volumes) -> dict[str, float]:
    """Name of a level -> bytes per step over its links, for an assignment."""
    paths = topology.paths()
    found = {level.name: 0.0 for level in topology.levels}
    for left, right, size in transfers(sizes, volumes):
        level = level_between(paths[assignment[left]], paths[assignment[right]])
        found[topology.levels[level].name] += size
    return found


def cost(assignment: Assignment, topology: Topology, sizes: Sizes, volumes: Volumes) -> float:
    """Cost of an assignment: seconds of all transfers of a step, one after the other, divided by the number of GPUs."""
    carried = traffic(assignment, topology, sizes, volumes)
    return sum(carried[level.name] / level.bandwidth for level in topology.levels) / sizes.world


def assign(topology: Topology, sizes: Sizes, volumes: Volumes, *, anchored: bool = False) -> RankPlacement:
    """Find the cheapest placement of the grid on the GPUs.

    Each candidate enumerates ranks and GPUs in parallel: ranks in every nesting of the axes, where one axis may be
    split into an inner and an outer factor (four data ranks per node, two islands), and GPUs with islands of unequal
    size in every order. Placements of small grids are then improved by exchanging pairs of ranks. On small cases the
    result equals the best of all permutations (see the tests).

    Args:
        topology: the machine.
        sizes: of the grid.
        volumes: bytes that a rank sends in a step.
        anchored: only consider placements with the first GPU on the first or the last stage, as :func:`rank_numbers`
            requires.

    Raises:
        ValueError: the number of ranks is not the number of GPUs.
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
    return RankPlacement(best[2], best[0], carried, tuple(f"{axis}{size}" for axis, size in best[1]))


def _is_anchored(assignment: Assignment, sizes: Sizes) -> bool:
    """Whether GPU 0 is on the first or the last stage."""
    return next(rank for rank, gpu in assignment.items() if gpu == 0)[0] in (0, sizes.pipeline - 1)


def rank_numbers(placement: RankPlacement, layout: Layout) -> list[int]:
    """Global rank of every GPU in a placement, such that the first GPU is rank 0.

    Rank 0 computes the loss, and has coordinate 0 on every other axis. Rotating a ring, or reversing a pipeline, does
    not change the bytes on any link. The grid is therefore rotated, and reversed if need be, until the first GPU has
    the coordinates of rank 0.

    Args:
        placement: from :func:`assign`, anchored.
        layout: the same grid, for the numbers of ranks.

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
    """Relative speed of every stage: that of its slowest GPU; None if all GPUs are equally fast.

    Args:
        topology: the machine.
        numbers: global rank of every GPU.
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
    """Exchange the GPUs of pairs of ranks as long as that lowers the cost, for grids that do not nest into the islands.

    Returns:
        The cost in seconds, and the assignment.
    """
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
    """All nestings of the axes in which at most one axis is split into two factors, without repetitions."""
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
    """Yield the axes with one of them split into two factors, in every way."""
    for index, (axis, size) in enumerate(whole):
        for inner in range(2, size):
            if size % inner == 0:
                yield [*whole[:index], (axis, inner), (axis, size // inner), *whole[index + 1 :]]


def walk(sizes: Sizes, order: Nesting) -> list[Rank]:
    """Coordinates of the grid in the order of a nesting, innermost factor fastest.

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
    """Yield orders of the GPUs: all orders of the islands (second-slowest level) if they are unequal and at most 6."""
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
    """Split layers over stages of unequal speed; minimizes the time of the slowest stage.

    Args:
        layers: number of layers.
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
