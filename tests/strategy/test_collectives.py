"""Steps may use collectives of their own, which mean the replicas, and may ask to stop; nobody waits in vain."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.scenario import compare_scenario
from tests.strategy import collective_scenarios as collectives

WIDE = pytest.mark.wide
LAYOUTS = [
    pytest.param((2, 2), 1, id="pp2xdp2"),
    pytest.param((1, 2), 2, id="dp2xtp2"),
    pytest.param((1, 2), 1, marks=WIDE, id="dp2"),
    pytest.param((2, 1), 1, marks=WIDE, id="pp2"),
    pytest.param((2, 1), 2, marks=WIDE, id="pp2xtp2"),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("layout", "tensor"), LAYOUTS)
@pytest.mark.parametrize(
    "scenario",
    [collectives.pairs_by_hand, pytest.param(collectives.pairs, marks=WIDE), collectives.reduced],
    ids=lambda scenario: scenario.__name__,
)
def test_collectives_in_a_step_are_over_the_replicas(scenario: Any, layout: tuple[int, int], tensor: int) -> None:
    compare_scenario(scenario, layout, tensor_parallel_size=tensor)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("layout", "tensor"), LAYOUTS)
@pytest.mark.parametrize(
    "scenario",
    [
        collectives.stopping_in_training,
        collectives.stopping_by_part,
        pytest.param(collectives.stopping_in_validation, marks=WIDE),
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_all_ranks_stop_where_one_asks_to(scenario: Any, layout: tuple[int, int], tensor: int) -> None:
    compare_scenario(scenario, layout, tensor_parallel_size=tensor)
