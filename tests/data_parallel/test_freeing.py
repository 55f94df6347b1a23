"""`weight_sharding={"free": "auto"}` keeps whole weights to the end of a step where that saves gathers and fits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data_parallel.freeing_scenarios import chosen
from tests.data_parallel.sharing_scenarios import Setup
from tests.harness import run_trainers

SPREAD = {"weight_sharding": True}
ONE = {**SPREAD, "whole_batch_loss": False}
SEVERAL = {**SPREAD, "micro_batch_size": 2}


def values(setup: Setup, rooms: list[float]) -> list[dict[str, Any]]:
    return [outcome.value for outcome in run_trainers(chosen, setup, rooms, devices=setup.devices)]


def test_a_step_of_one_micro_batch_frees_layers_behind_them() -> None:
    for value in values(Setup((1, 2, 1), ONE), [100, 100]):
        assert not value["keeps"]
        assert value["chosen"] == "free='layer', as a step has one micro-batch"


def test_a_step_of_several_keeps_whole_weights_to_its_end_where_they_fit_twice() -> None:
    for rank, value in enumerate(values(Setup((1, 2, 1), SEVERAL), [2.01, 3])):
        assert value["keeps"]
        assert value["opened"][1] > 2 * value["windows"], "the step that is measured frees layers"
        assert value["opened"][2:] == [value["windows"]] * 6, "each window once a step from then on"
        assert value["chosen"].startswith("free='step', as layers run 3 times in a step, and of the ")
        assert len(value["said"]) == (rank == 0), "said once"
        assert "rank 0: `weight_sharding` has free='step', as" in value["report"]


def test_one_replica_without_room_lets_all_free_layers() -> None:
    for value in values(Setup((1, 2, 1), SEVERAL), [100, 1.9]):
        assert not value["keeps"]
        assert value["chosen"].startswith("free='layer', as layers run 3 times in a step, and of the ")


def test_each_stage_chooses_by_its_own_room() -> None:
    found = values(Setup((2, 2, 1), SEVERAL), [100, 100, 1, 100])
    assert [value["keeps"] for value in found] == [True, True, False, False]
    assert [len(value["said"]) for value in found] == [1, 0, 1, 0]
    assert "rank 2: `weight_sharding` has free='layer'" in found[0]["report"]


def test_the_step_that_is_measured_comes_behind_an_update() -> None:
    setup = Setup((1, 2, 1), SEVERAL, {"accumulate_grad_batches": 2})
    for value in values(setup, [100, 100]):
        windows = value["windows"]
        assert min(value["opened"][1:3]) > 2 * windows and value["opened"][3:] == [windows] * 5


@pytest.mark.parametrize("free", ["layer", "step"])
def test_what_a_user_says_is_neither_measured_nor_told(free: str) -> None:
    setup = Setup((1, 2, 1), {"weight_sharding": {"free": free}, "micro_batch_size": 2})
    for value in values(setup, [0, 0]):
        assert value["keeps"] == (free == "step")
        assert not value["said"] and not value["chosen"]
