"""Placements on uneven machines equal the best of all permutations, counted byte by byte."""

from __future__ import annotations

import itertools

import pytest

from lightning_megatron.planner import ModelShape, Recipe
from lightning_megatron.planner.topology import (
    Level,
    Sizes,
    Topology,
    Volumes,
    assign,
    cost,
    step_volumes,
    traffic,
    uneven_split,
    walk,
)

EVEN = Topology.even([2, 3], [100.0, 10.0])
UNEVEN = Topology((Level("node", (4, 2), 100.0), Level("cluster", (6,), 1.0)))
THREE_LEVELS = Topology((Level("node", (2, 2, 2), 100.0), Level("island", (4, 2), 10.0), Level("site", (6,), 1.0)))


@pytest.mark.parametrize("topology", [EVEN, UNEVEN, THREE_LEVELS], ids=["even", "uneven", "three levels"])
@pytest.mark.parametrize("sizes", [(2, 1, 3), (3, 1, 2), (1, 3, 2), (3, 2, 1), (2, 3, 1)])
@pytest.mark.parametrize("volumes", [(100.0, 10.0, 1.0), (1.0, 10.0, 5.0), (3.0, 3.0, 3.0)])
def test_a_placement_costs_what_the_best_permutation_costs(
    topology: Topology, sizes: tuple[int, int, int], volumes: tuple[float, float, float]
) -> None:
    grid, moved = Sizes(*sizes), Volumes(*volumes)
    found = assign(topology, grid, moved)
    best = min(
        cost(dict(zip(grid.ranks(), order, strict=True)), topology, grid, moved)
        for order in itertools.permutations(range(6))
    )
    assert found.seconds == pytest.approx(best)
    assert sorted(found.assignment.values()) == list(range(6))


def test_traffic_is_counted_on_the_level_where_two_gpus_meet() -> None:
    """Ranks in order on 2 nodes of 2: tensor pairs inside, pipeline across; a ring of two counts both directions."""
    topology, sizes = Topology.even([2, 2], [100.0, 1.0]), Sizes(pipeline=2, data=1, tensor=2)
    placed = {(0, 0, 0): 0, (0, 0, 1): 1, (1, 0, 0): 2, (1, 0, 1): 3}
    assert traffic(placed, topology, sizes, Volumes(tensor=7.0, data=0.0, pipeline=3.0)) == {
        "node": 28.0,
        "island": 6.0,
    }
    crossed = {(0, 0, 0): 0, (0, 0, 1): 2, (1, 0, 0): 1, (1, 0, 1): 3}
    assert traffic(crossed, topology, sizes, Volumes(7.0, 0.0, 3.0)) == {"node": 6.0, "island": 28.0}


def test_megatrons_order_is_chosen_where_tensor_traffic_is_heaviest() -> None:
    found = assign(Topology.even([8, 4, 2], [300e9, 25e9, 2e9]), Sizes(2, 4, 8), Volumes(1e12, 1e10, 1e9))
    assert found.order == ("tensor8", "data4", "pipeline2")
    assert found.bytes_by_level["cluster"] == pytest.approx(1e9 * 4 * 8)


def test_data_parallelism_crosses_islands_only_if_it_moves_less_than_the_pipeline() -> None:
    topology = Topology.even([4, 2], [100.0, 1.0])
    assert assign(topology, Sizes(4, 2, 1), Volumes(0, 1.0, 100.0)).order[0] == "pipeline4"
    assert assign(topology, Sizes(2, 4, 1), Volumes(0, 100.0, 1.0)).order[0] == "data4"


def test_a_walk_runs_through_its_innermost_axis_first() -> None:
    assert walk(Sizes(2, 1, 2), (("tensor", 2), ("pipeline", 2))) == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    cut = walk(Sizes(1, 4, 2), (("data", 2), ("tensor", 2), ("data", 2)))
    assert cut[:4] == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    assert sorted(cut) == Sizes(1, 4, 2).ranks()


def test_volumes_of_a_step_follow_the_papers() -> None:
    shape = ModelShape(layers=8, hidden=64, heads=4, vocab=100, seq=16)
    found = step_volumes(shape, Recipe(tensor=4, pipeline=2, data=2, micro_batch=3, global_batch=24))
    assert found.pipeline == 2 * (2 * 3 * 16 * 64 / 4) * 4
    assert found.tensor == pytest.approx(4 * 2 * (3 / 4) * (2 * 3 * 16 * 64) * 4 * 4)


def test_topologies_that_do_not_nest_are_refused() -> None:
    with pytest.raises(ValueError, match="different numbers of GPUs"):
        Topology((Level("node", (2, 2), 1.0), Level("cluster", (6,), 1.0)))
    with pytest.raises(ValueError, match="cut groups of 'node'"):
        Topology((Level("node", (3, 3), 1.0), Level("island", (2, 4), 1.0), Level("cluster", (6,), 1.0)))
    with pytest.raises(ValueError, match="several groups"):
        Topology((Level("node", (3, 3), 1.0),))
    with pytest.raises(ValueError, match=r"grid of 2 x 2 x 2 = 8 ranks does not fill 6 GPUs"):
        assign(EVEN, Sizes(2, 2, 2), Volumes(1, 1, 1))


@pytest.mark.parametrize(("layers", "speeds"), [(8, [3.0, 1.0]), (7, [1.0, 1.0, 1.0]), (9, [2.0, 1.0, 1.5])])
def test_an_uneven_split_is_the_best_of_all_splits(layers: int, speeds: list[float]) -> None:
    found = uneven_split(layers, speeds)
    assert sum(found) == layers and min(found) >= 1
    options = (split for split in itertools.product(range(1, layers), repeat=len(speeds)) if sum(split) == layers)
    best = min(max(n / speed for n, speed in zip(split, speeds, strict=True)) for split in options)
    assert max(n / speed for n, speed in zip(found, speeds, strict=True)) == pytest.approx(best)
    with pytest.raises(ValueError, match="use fewer pipeline stages"):
        uneven_split(1, speeds)
