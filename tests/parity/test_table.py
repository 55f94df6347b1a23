"""Losses, weights, metrics, learning rates and the chosen checkpoint are those of one process."""

from __future__ import annotations

import itertools

import pytest

from tests.parity.compare import check
from tests.parity.row import Row
from tests.parity.table import (
    FACTORS,
    FURTHER_SCHEDULES,
    KINDS_OF_SCHEDULE,
    LAYOUTS_OF_ONE_SCHEDULE,
    SCHEDULES,
    TWO_STAGES,
    covering,
    everyday,
    everything,
    kinds_of_layout,
    kinds_of_schedule,
)
from tests.parity.zoo.registry import ZOO


def test_the_covering_subset_meets_every_pair_of_values() -> None:
    settings = covering()
    for (one, values), (other, others) in itertools.combinations(enumerate(FACTORS), 2):
        for value, another in itertools.product(values, others):
            assert any(setting[one] == value and setting[other] == another for setting in settings)


def test_the_exhaustive_table_meets_each_module_in_most_kinds_of_layout_and_schedule() -> None:
    rows = set(everything())
    layouts, schedules = {(row.module, row.layout) for row in rows}, {(row.module, row.schedule) for row in rows}
    for module in ZOO:
        met = [any((module, layout) in layouts for layout in kind) for kind in LAYOUTS_OF_ONE_SCHEDULE]
        assert sum(met) >= kinds_of_layout(module)
        assert sum((module, layout) in layouts for layout in TWO_STAGES) >= kinds_of_schedule(module)
        met = [any((module, name) in schedules for name in kind) for kind in KINDS_OF_SCHEDULE]
        assert sum(met) >= kinds_of_schedule(module)
    assert {name for _, name in layouts} >= {layout for choice in LAYOUTS_OF_ONE_SCHEDULE for layout in choice}
    assert {name for _, name in schedules} == {*SCHEDULES, *FURTHER_SCHEDULES}


EVERYDAY = everyday()


@pytest.mark.parametrize("row", EVERYDAY, ids=str)
def test_training_is_that_of_one_process(row: Row) -> None:
    check(row)


@pytest.mark.wide(together=lambda row: row.reference)
@pytest.mark.parametrize("row", [row for row in dict.fromkeys(everything()) if row not in EVERYDAY], ids=str)
def test_training_is_that_of_one_process_in_every_row(row: Row) -> None:
    check(row)
