"""The World that a strategy is given: who gets which, and that a rehearsal's replaces all of the real one."""

from __future__ import annotations

import torch
from torch import nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.pipeline.run.links import LinkOptions
from lightning_megatron.strategy.world import REAL_WORLD, World
from lightning_megatron.tools.rehearsal.neighbours import PaperWorld


def test_a_rehearsal_replaces_every_method_of_the_world() -> None:
    methods = {name for name in vars(World) if not name.startswith("_")}
    assert methods >= {"watch", "materialize", "links", "executor", "compares"}
    assert set(vars(PaperWorld)) >= methods


def test_an_unstarted_strategy_gets_the_world_that_it_is_given_and_else_keeps_its_own() -> None:
    world, strategy = World(LinkOptions(under_way=3)), MegatronStrategy()
    assert strategy._processes.world is REAL_WORLD
    other = strategy.unstarted(world)
    assert other._processes.world is world and strategy._processes.world is REAL_WORLD
    assert other.unstarted(bucket_size_mb=3.0)._processes.world is world


def test_the_real_world_gives_memory_and_values_to_what_is_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    REAL_WORLD.materialize(module, torch.device("cpu"), 1, {})
    assert module.weight.device.type == "cpu" and module.weight.abs().sum() > 0
