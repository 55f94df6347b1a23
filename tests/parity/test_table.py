"""Losses, weights, metrics, learning rates and the chosen checkpoint are those of one process."""

from __future__ import annotations

import itertools

import pytest

from tests.parity.compare import check
from tests.parity.row import Row
from tests.parity.table import (
    FACTORS,
    FURTHER_SCHEDULES,
    LAYOUTS_OF_ONE_SCHEDULE,
    SCHEDULES,
    TWO_STAGES,
    covering,
    everyday,
    everything,
)
from tests.parity.zoo.registry import ZOO


def test_the_covering_subset_meets_every_pair_of_values() -> None:
    settings = covering()
    for (one, values), (other, others) in itertools.combinations(enumerate(FACTORS), 2):
        for value, another in itertools.product(values, others):
            assert any(setting[one] == value and setting[other] == another for setting in settings)


def test_the_exhaustive_table_meets_each_module_in_each_kind_of_layout_and_under_each_schedule() -> None:
    rows = set(everything())
    layouts, schedules = {(row.module, row.layout) for row in rows}, {(row.module, row.schedule) for row in rows}
    assert layouts >= set(itertools.product(ZOO, TWO_STAGES))
    for module, choice in itertools.product(ZOO, LAYOUTS_OF_ONE_SCHEDULE):
        assert any((module, layout) in layouts for layout in choice)
    assert {layout for choice in LAYOUTS_OF_ONE_SCHEDULE for layout in choice} <= {layout for _, layout in layouts}
    assert schedules >= set(itertools.product(ZOO, FURTHER_SCHEDULES)) and {name for _, name in schedules} >= set(
        SCHEDULES
    )


EVERYDAY = everyday()


@pytest.mark.parametrize("row", EVERYDAY, ids=str)
def test_training_is_that_of_one_process(row: Row) -> None:
    check(row)


@pytest.mark.wide(together=lambda row: row.reference)
@pytest.mark.parametrize("row", [row for row in dict.fromkeys(everything()) if row not in EVERYDAY], ids=str)
def test_training_is_that_of_one_process_in_every_row(row: Row) -> None:
    check(row)
