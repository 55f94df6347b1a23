"""``layout="auto"``, ``from_plan`` and ``topology`` on real processes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from lightning_megatron import MegatronStrategy
from lightning_megatron.mesh.layout import Layout
from lightning_megatron.planner import Cluster, Gpu, ModelShape, Recipe, plan
from lightning_megatron.planner.topology import (
    Level,
    Sizes,
    Topology,
    Volumes,
    assign,
    cost,
    rank_numbers,
    stage_speeds,
)
from tests.harness import run_trainers
from tests.strategy.planning_scenarios import train

CPU = Cluster(Gpu("CPU", "ampere", 1e11, 0.0, 4e9, 1e10, 1), nvlink=2e9, network=1e9)
PAIRS = (Level("node", (2, 2), 1e10), Level("cluster", (4,), 1e8))


@pytest.mark.parametrize("kind", ["whole", "late"])
def test_a_layout_is_planned_from_the_module_its_loader_and_the_processes(kind: str) -> None:
    settings: dict[str, Any] = {"layout": "auto", "layout_options": {"cluster": CPU, "tensor": 1, "pipeline": 2}}
    values = [outcome.value for outcome in run_trainers(train, kind, settings, 8, devices=4)]
    assert {value["sizes"] for value in values} == {(2, 2, 1)}
    assert len({value["plan"] for value in values}) == 1 and "2 pipeline stages" in values[0]["plan"]
    assert all(value["losses"] == values[0]["losses"] for value in values)


def test_the_planned_layout_trains_to_the_losses_of_one_process() -> None:
    (single,) = [outcome.value for outcome in run_trainers(train, "whole", None, 8, devices=1)]
    settings = {"layout": "auto", "layout_options": {"cluster": CPU, "pipeline": 2}}
    for outcome in run_trainers(train, "whole", settings, 8, devices=2):
        assert outcome.value["sizes"] == (2, 1, 1)
        assert outcome.value["losses"] == pytest.approx(single["losses"], abs=1e-5)


def test_processes_are_numbered_so_that_the_heaviest_traffic_stays_in_a_node() -> None:
    """Transfers between stages outweigh gradients here, so each pipeline lies within a node."""
    settings: dict[str, Any] = {"pipeline_parallel_size": 2, "micro_batch_size": 16}
    launched = [outcome.value for outcome in run_trainers(train, "whole", settings, 128, 1, devices=4)]
    placed = run_trainers(train, "whole", {**settings, "topology": Topology(PAIRS)}, 128, 1, devices=4)
    across = [[], []]
    for found, values in zip(across, (launched, [outcome.value for outcome in placed]), strict=True):
        for process, value in enumerate(values):
            found += [size for other, size in value["sent"] if other // 2 != process // 2 and size > 1000]
    assert sum(across[0]) > 1e6 and sum(across[1]) == 0
    assert placed[0].value["rank"] == 0 and sorted(o.value["rank"] for o in placed) == [0, 1, 2, 3]
    assert [o.value["rank"] for o in placed] == placed[0].value["numbers"] == [0, 2, 1, 3]
    losses = {tuple(value["losses"]) for value in [*launched, *(outcome.value for outcome in placed)]}
    assert len(losses) == 1


def test_slower_processes_get_fewer_layers() -> None:
    topology = Topology(PAIRS, speeds=(3.0, 1.0, 3.0, 1.0))
    settings = {"pipeline_parallel_size": 2, "micro_batch_size": 16, "topology": topology}
    for outcome in run_trainers(train, "whole", settings, 128, 1, devices=4):
        assert outcome.value["layers"] == [1, 3]  # the last stage has global rank 0, which is fast


@pytest.mark.parametrize("sizes", [(3, 1, 2), (3, 2, 1), (2, 3, 1), (2, 1, 3), (1, 3, 2)])
@pytest.mark.parametrize("volumes", [(100.0, 10.0, 1.0), (1.0, 10.0, 5.0), (1.0, 1.0, 9.0)])
def test_numbered_ranks_cost_what_the_best_of_all_permutations_costs(
    sizes: tuple[int, int, int], volumes: tuple[float, float, float]
) -> None:
    topology = Topology((Level("node", (4, 2), 100.0), Level("cluster", (6,), 1.0)))
    grid, moved = Sizes(*sizes), Volumes(*volumes)
    layout = Layout(tensor=sizes[2], data=sizes[1], pipeline=sizes[0])
    placed = assign(topology, grid, moved, anchored=True)
    numbers = rank_numbers(placed, layout)
    assert numbers[0] == 0 and sorted(numbers) == list(range(6))
    mesh = {}
    for gpu, rank in enumerate(numbers):
        at = layout.coordinates(rank)
        mesh[at.pipeline, at.data, at.tensor] = gpu
    ends = (0, grid.pipeline - 1)
    permuted = (dict(zip(grid.ranks(), order, strict=True)) for order in itertools.permutations(range(6)))
    best = min(cost(one, topology, grid, moved) for one in permuted if any(one[r] == 0 and r[0] in ends for r in one))
    assert cost(mesh, topology, grid, moved) == pytest.approx(best)
    assert stage_speeds(topology, numbers, layout) is None


def test_a_strategy_is_made_from_what_the_planner_found() -> None:
    shape = ModelShape(layers=24, hidden=2048, heads=16, vocab=50000, seq=2048)
    found = plan(shape, Cluster.named("A100-80"), 16, 64)
    strategy = MegatronStrategy.from_plan(found, bucket_size_mb=50.0)
    recipe = found.best.recipe
    assert strategy.options.sizes["tensor"] == recipe.tensor and strategy.options.sizes["pipeline"] == recipe.pipeline
    assert strategy.options.micro_batch_size == recipe.micro_batch
    for prediction in found.ranked:
        MegatronStrategy.from_plan(prediction)
    interleaved = Recipe(tensor=2, pipeline=4, chunks=3, schedule="interleaved", recompute="full", global_batch=8)
    made = MegatronStrategy.from_plan(interleaved)
    assert made.options.engine().schedule_shape.chunks == 3
    assert made.options.activation_recompute == "full"
    with pytest.raises(ValueError, match="cannot be run by MegatronStrategy"):
        MegatronStrategy.from_plan(Recipe(mlp_chunks=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "best"}, "must be 'auto' or left out"),
        ({"layout": "auto", "tensor_parallel_size": 2}, "`tensor_parallel_size=2` is given; leave it out"),
        ({"layout": "auto", "layout_options": {"tensors": 2}}, "known options are batch_size"),
        ({"layout_options": {"seq": 2}}, "without `layout='auto'` or `topology`"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronStrategy(**settings)


def test_what_cannot_be_detected_is_asked_for() -> None:
    from lightning_megatron.strategy.planning import facts
    from tests.tools.rehearsal_scenarios import SmallGPT

    module = SmallGPT()
    with pytest.raises(ValueError, match=r"layout_options=\{'batch_size'"):
        facts(module, {})
    with pytest.raises(ValueError, match=r"layout_options=\{'seq'"):
        facts(module, {"batch_size": 4})
    shape, batch = facts(module, {"batch_size": 4, "seq": 32, "heads": 4})
    assert batch == 4 and (shape.layers, shape.hidden, shape.heads, shape.vocab) == (4, 64, 4, 256)
    assert all(p.device == torch.device("cpu") for p in module.parameters())
