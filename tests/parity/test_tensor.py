"""Modules split over tensor ranks, with and without sequence shards, train as one process does."""

from __future__ import annotations

import itertools

import pytest

from tests.parity.tensor_rows import WIDELY, TensorRow, check_row, everyday, everything, options


def test_main_modules_meet_any_two_settings_of_a_layout() -> None:
    rows = set(everything())
    for at, other in itertools.combinations(("tensor", "stages", "replicas", "sequence"), 2):
        met = {(row.module, getattr(row, at), getattr(row, other)) for row in rows}
        columns = ((2, 4) if at == "tensor" else (1, 2), (False, True) if other == "sequence" else (1, 2))
        assert met >= set(itertools.product(WIDELY, *columns))


@pytest.mark.everyday(2)
@pytest.mark.parametrize("row", everyday(), ids=str)
def test_training_over_tensor_ranks_is_that_of_one_process(row: TensorRow) -> None:
    check_row(row)


@pytest.mark.wide
@pytest.mark.parametrize("row", options(), ids=str)
def test_training_over_tensor_ranks_with_other_options_is_that_of_one_process(row: TensorRow) -> None:
    check_row(row)


@pytest.mark.wide
@pytest.mark.parametrize("row", list(dict.fromkeys(everything())), ids=str)
def test_training_over_tensor_ranks_is_that_of_one_process_in_every_row(row: TensorRow) -> None:
    check_row(row)
