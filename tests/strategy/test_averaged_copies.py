"""Averages and teachers that hooks update from the trained weights are, on every stage, those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_trainers
from tests.harness.remember import remembered
from tests.parity.scenario import differences
from tests.strategy import copy_scenarios as copies

LAYOUTS: list[Any] = [
    (2, 1),
    pytest.param((3, 1), marks=pytest.mark.wide),
    pytest.param((2, 2), marks=pytest.mark.wide),
]
KINDS = [
    kind if kind in ("zipped", "claimed", "loaded") else pytest.param(kind, marks=pytest.mark.wide)
    for kind in copies.KINDS
]


@remembered
def _one_process(kind: str) -> Any:
    return run_trainers(copies.averaged, None, {}, kind, devices=1)[0].value


@pytest.mark.everyday(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["pp2", "pp3", "pp2xdp2"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hook_averages_on_each_stage_is_whole_on_all(kind: str, layout: tuple[int, int]) -> None:
    expected = _one_process(kind)
    for outcome in run_trainers(copies.averaged, layout, {}, kind, devices=layout[0] * layout[1]):
        assert not list(differences("", outcome.value, expected, 1e-9)), outcome.rank


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["parts", pytest.param("zipped", marks=pytest.mark.wide)])
def test_copies_of_layers_that_tensor_ranks_share_are_averaged_on_all_stages(kind: str) -> None:
    (plain,) = run_trainers(copies.averaged_whole, None, {}, kind, devices=1)
    first = run_trainers(copies.averaged_whole, (2, 1), {"tensor_parallel_size": 2}, kind, devices=4)[0]
    assert not list(differences("", first.value, plain.value, 1e-9))


@pytest.mark.wide
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "dualpipe-v"])
def test_a_stage_of_two_pieces_averages_both(schedule: str) -> None:
    expected = _one_process("zipped")
    for outcome in run_trainers(copies.averaged, (2, 1), {"pipeline_schedule": schedule}, "zipped", devices=2):
        assert not list(differences("", outcome.value, expected, 1e-9)), outcome.rank


@pytest.mark.wide
def test_stages_that_change_a_copy_differently_are_told() -> None:
    for outcome in run_trainers(copies.apart, (2, 1), {}, devices=2, check=False, grace=20.0):
        said = f"{outcome.error}{outcome.output}"
        assert "`ema.embed.weight`" in said and "differently on the stages" in said, said
