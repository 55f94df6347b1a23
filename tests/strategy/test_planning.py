"""``layout="auto"``, ``from_plan`` and ``topology`` on real processes."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_megatron import MegatronStrategy
from lightning_megatron.mesh.layout import Layout
from lightning_megatron.planner import Cluster, Gpu, Limits, ModelShape, Recipe, plan
from lightning_megatron.planner.cost.sharded_state import case_of
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
from lightning_megatron.strategy.options.recipes import arguments_of, recipe_of_run
from lightning_megatron.strategy.planning import limits_of, shardings_of
from tests.harness import run_trainers
from tests.strategy.planning_scenarios import train
from tests.tools.rehearsal_scenarios import SmallGPT

CPU = Cluster(Gpu("CPU", "ampere", 1e11, 0.0, 4e9, 1e10, 1), nvlink=2e9, network=1e9)
PAIRS = (Level("node", (2, 2), 1e10), Level("cluster", (4,), 1e8))


@pytest.mark.everyday(1)
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


@pytest.mark.wide
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


ROUND_TRIPS = [
    Recipe(tensor=2, pipeline=2, data=2, micro_batch=2, global_batch=8, sequence_parallel=False, recompute="selective"),
    Recipe(pipeline=2, chunks=3, schedule="interleaved", global_batch=4, recompute="full", sharding="none"),
    Recipe(pipeline=2, chunks=2, schedule="zb-v", data=2, global_batch=8, precision="fp32"),
    Recipe(context=4, data=2, global_batch=4, context_method="ulysses", loss_chunks=6, precision="fp64"),
    Recipe(context=4, global_batch=4, context_method="ulysses", context_heads=2),
    Recipe(tensor=2, data=4, expert=8, global_batch=4, precision="bf16"),
    Recipe(data=4, global_batch=8, sharding="fsdp", free="step", gradient_sum="micro_batch"),
    Recipe(data=4, global_batch=8, sharding="hsdp", shard=2, optimizer_offload=0.75),
    Recipe(data=4, global_batch=8, shard=2, mlp_chunks=5, precision="fp16"),
    Recipe(global_batch=2, activation_offload=0.4, gradient_bytes=4),
    Recipe(activation_offload="auto"),
    Recipe(pipeline=2, global_batch=2, activation_offload=1.0),
]
PREDICTED_ONLY = {"software", "imbalance", "gradient_bytes", "weight_offload"}
"""Fields without an option: the first two describe what is not asked for, the others are refused where they differ."""


def _run_of(recipe: Recipe) -> Recipe:
    """What a run with a recipe's arguments is to the planner."""
    layout = Layout(tensor=recipe.tensor, context=recipe.context, data=recipe.data, pipeline=recipe.pipeline)
    options = MegatronStrategy.from_plan(recipe).options
    return recipe_of_run(options, layout, recipe.global_batch // recipe.data, recipe.precision)


def _normal(recipe: Recipe) -> Recipe:
    """A recipe with what goes without saying."""
    case = case_of(recipe)
    said = {"free": "layer" if case.frees_layers else "step", "gradient_sum": "step"}
    said["gradient_sum"] = "micro_batch" if case.sums_micro_batches else "step"
    return replace(
        recipe,
        sharding="fsdp" if recipe.sharding == "hsdp" else recipe.sharding,
        sequence_parallel=recipe.sequence_parallel and recipe.tensor > 1,
        gradient_bytes=None,
        **(said if recipe.shards_weights else {}),
    )


@pytest.mark.parametrize("recipe", ROUND_TRIPS, ids=lambda recipe: recipe.describe())
def test_a_recipe_is_the_recipe_of_its_run(recipe: Recipe) -> None:
    assert _normal(_run_of(recipe)) == _normal(recipe)


def test_every_field_of_a_recipe_makes_the_round_trip() -> None:
    plain = Recipe()
    changed = {f.name for f in fields(Recipe) for r in ROUND_TRIPS if getattr(r, f.name) != getattr(plain, f.name)}
    assert {field.name for field in fields(Recipe)} - changed == PREDICTED_ONLY - {"gradient_bytes"}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(sharding="zero2"), "which shards weights too"),
        (Recipe(sharding="hsdp"), "say over how many replicas with `shard`"),
        (Recipe(recompute="auto"), "use 'none', 'selective' or 'full'"),
        (Recipe(activation_offload="inputs", recompute="full"), "`activation_offload=0.0, recompute='none'`"),
        (Recipe(sharding="fsdp", weight_offload=True), "`weight_offload=True` is not implemented for training"),
        (Recipe(gradient_bytes=2), "gradients of bf16 add up in 4 bytes"),
    ],
)
def test_what_no_run_does_is_refused_with_what_comes_nearest(recipe: Recipe, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MegatronStrategy.from_plan(recipe)


@pytest.mark.parametrize(
    ("options", "without"),
    [
        ({}, {}),
        ({"loss_chunks": 2}, {"shardings": ("zero1", "none")}),
        ({"nonfinite": "raise"}, {"context": 1}),
        ({"overlap_parameter_gather": True}, {"context": 1, "shardings": ("zero1", "none")}),
        ({"optimizer_sharding": False}, {"shardings": ("none",)}),
    ],
)
def test_the_planner_is_offered_what_goes_together_with_the_other_options(options: Any, without: Any) -> None:
    module = SmallGPT()
    module.trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    chosen = MegatronStrategy(layout="auto", **options).options
    usual = Limits(shardings=shardings_of(chosen), offload=True)
    assert limits_of(chosen, module, usual) == without


RUNS = [
    {"context": 2, "context_method": "ring", "loss_chunks": 4, "micro_batch": 4},
    {"data": 2, "sharding": "fsdp", "free": "step", "gradient_sum": "micro_batch", "micro_batch": 2},
    *(
        pytest.param(changed, marks=pytest.mark.wide)
        for changed in (
            {"data": 2, "sharding": "fsdp", "optimizer_offload": 0.5, "micro_batch": 4},
            {"pipeline": 2, "activation_offload": 0.5, "micro_batch": 2},
            {"tensor": 2, "activation_offload": 1.0, "micro_batch": 8},
            {"pipeline": 2, "schedule": "zb-v", "chunks": 2, "loss_chunks": 2, "micro_batch": 2},
            {"data": 2, "sharding": "none", "recompute": "full", "micro_batch": 8},
        )
    ),
]


@pytest.mark.wide
@pytest.mark.parametrize("changed", RUNS, ids=lambda changed: "-".join(changed))
def test_recipes_train_to_the_losses_of_one_process(changed: dict[str, Any]) -> None:
    recipe = Recipe(**changed, global_batch=8 * changed.get("data", 1), precision="fp32")
    (single,) = [outcome.value for outcome in run_trainers(train, "whole", None, 8 * recipe.data, devices=1)]
    found = [outcome.value for outcome in run_trainers(train, "whole", arguments_of(recipe), 8, devices=2)]
    assert {_normal(value["recipe"]) for value in found} == {_normal(recipe)}
    losses = [sum(step) / recipe.data for step in zip(*(v["losses"] for v in found[:: 2 // recipe.data]), strict=True)]
    assert losses == pytest.approx(single["losses"], abs=1e-5)
