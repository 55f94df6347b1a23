"""Modules split over tensor ranks, with and without sequence shards, train as one process does."""

from __future__ import annotations

import pytest

from tests.parity.tensor_rows import TensorRow, check_row, everyday, everything, options


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
