"""The strategy's options: one list of arguments, checked when they are made, and changed by the planner as a whole."""

from __future__ import annotations

import dataclasses
import inspect
import re
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.mesh.layout import Layout
from lightning_megatron.planner import Recipe
from lightning_megatron.planner.topology import Topology
from lightning_megatron.strategy.options.options import Options
from lightning_megatron.strategy.options.run_checks import check_micro_batch, check_run

LIGHTNINGS = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
RECIPE = Recipe(tensor=2, pipeline=4, chunks=3, schedule="interleaved", recompute="full", global_batch=8)


def test_the_strategy_takes_every_option_with_the_same_default() -> None:
    taken = {name: value.default for name, value in inspect.signature(MegatronStrategy).parameters.items()}
    options = {field.name: field.default for field in dataclasses.fields(Options)}
    assert {name: value for name, value in taken.items() if name not in LIGHTNINGS} == options
    assert all(taken[name] is None for name in LIGHTNINGS)


def test_every_argument_of_the_strategy_is_described_where_help_shows_it() -> None:
    described = re.findall(r"^        ([a-z_]+): ", inspect.getdoc(MegatronStrategy).replace("\n", "\n    "), re.M)
    assert set(inspect.signature(MegatronStrategy).parameters) <= set(described)


def test_the_strategy_keeps_what_it_was_given() -> None:
    options = MegatronStrategy(2, 3, bucket_size_mb=50.0, nonfinite="skip", pipeline_split="profile").options
    assert (options.pipeline_parallel_size, options.data_parallel_size, options.nonfinite) == (2, 3, "skip")
    engine = options.engine(torch.bfloat16)
    assert engine.gradients.bucket_bytes == 50 * 1024 * 1024 and engine.gradients.inspect
    assert engine.gradients.layer_dtype is torch.bfloat16
    assert engine.record_timeline and options.module().pipeline_split == "auto"
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.nonfinite = None  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_parallel_size": 0}, r"`pipeline_parallel_size=0` must be an integer of at least 1"),
        ({"sequence_parallel": True}, "`sequence_parallel=True` needs `tensor_parallel_size`"),
        ({"pipeline_parallel_size": 2, "pipeline_split": [1, 2, 3]}, "must be 'auto' or a list of 2"),
        ({"nonfinite": "stop"}, "`nonfinite='stop'` must be"),
        ({"overlap_parameter_gather": True, "optimizer_sharding": False}, "needs `optimizer_sharding`"),
        (
            {"hang_timeout": 20},
            r"`hang_timeout=20` must be .* `hang_timeout=timedelta\(seconds=20\)`",
        ),
        ({"hang_timeout": timedelta(0)}, "must be longer than 0; pass a longer time, or None for never"),
        ({"timeout": timedelta(seconds=-1)}, "`timeout=.*` must be longer than 0"),
        ({"pipeline_placement": ["model.norm"]}, r"`pipeline_placement=\['model.norm'\]` must be a dict"),
        (
            {"topology": "two islands"},
            "`topology='two islands'` must be a `lightning_megatron",
        ),
        ({"compile_layers": True, "pipeline_schedule": "zb-h1"}, "`pipeline_schedule='zb-h1'` splits the backward"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_when_they_are_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**arguments)


def test_a_recipe_changes_the_layout_and_nothing_else() -> None:
    before = Options(layout="auto", layout_options={"seq": 8}, bucket_size_mb=3.0, nonfinite="raise")
    after = before.with_recipe(RECIPE)
    assert (after.layout, after.layout_options) == (None, None)
    assert after.sizes == {"tensor": 2, "context": 1, "data": 1, "pipeline": 4, "last_stage_first": True}
    assert (after.pipeline_schedule, after.virtual_pipeline_parallel_size) == ("interleaved", 3)
    assert (after.activation_recompute, after.bucket_size_mb, after.nonfinite) == ("full", 3.0, "raise")
    assert before.layout == "auto" and before.pipeline_parallel_size == 1


def test_facts_stay_known_where_a_topology_has_to_be_numbered_still() -> None:
    topology = Topology.even((4, 2), (100.0, 1.0))
    after = Options(layout="auto", layout_options={"seq": 8}, topology=topology).with_recipe(RECIPE)
    assert after.layout_options == {"seq": 8} and after.asks_the_planner


def test_a_layout_that_contradicts_another_option_is_refused() -> None:
    compiled = Options(layout="auto", compile_layers=True)
    with pytest.raises(ValueError, match="splits the backward"):
        compiled.with_recipe(dataclasses.replace(RECIPE, schedule="zb-h1", chunks=1))
    with pytest.raises(ValueError, match="cannot be run by MegatronStrategy"):
        Options().with_recipe(Recipe(sharding="zero2"))


def test_nothing_is_gathered_late_where_the_planner_shares_nothing_out() -> None:
    options = Options(layout="auto", overlap_parameter_gather=True)
    assert not options.with_recipe(dataclasses.replace(RECIPE, sharding="none")).overlap_parameter_gather
    assert options.with_recipe(dataclasses.replace(RECIPE, sharding="zero1")).overlap_parameter_gather


def test_a_plan_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`from_plan\('fast'\)` needs what the planner returned"):
        MegatronStrategy.from_plan("fast")  # type: ignore[arg-type]


def test_micro_batches_larger_than_a_batch_are_refused() -> None:
    loader = DataLoader(range(64), batch_size=8)
    check_micro_batch(loader, 8)
    check_micro_batch(loader, "auto")
    check_micro_batch([1, 2], 64)
    with pytest.raises(ValueError, match=r"`micro_batch_size=64` is more than .*batch_size=8.* use at most 8"):
        check_micro_batch(loader, 64)


def test_a_negative_bound_of_gradients_is_refused() -> None:
    trainer: Any = SimpleNamespace(callbacks=[], loggers=[], gradient_clip_val=-1.0)
    with pytest.raises(MisconfigurationException, match=r"`Trainer\(gradient_clip_val=-1.0\)` must not be below 0"):
        check_run(trainer, BoringModel(), Layout(), "auto")
    trainer.gradient_clip_val = 0.5
    check_run(trainer, BoringModel(), Layout(), "auto")
