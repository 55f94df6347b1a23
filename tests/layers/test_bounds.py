"""Indices that no rank has an entry for are refused, on the device where need be."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.layers.bounds import assert_none, check_bounds


@pytest.mark.parametrize("index", [[0, 6], [-1], [7, 3]])
def test_an_index_outside_is_refused(index: list[int]) -> None:
    inside = [0 <= each < 6 for each in index]
    with pytest.raises(IndexError, match=rf"Token id {index[inside.index(False)]} is outside of 6 entries"):
        check_bounds(torch.tensor(index), 6, "Token id")
    check_bounds(torch.tensor(index), 6, "Token id", kept=torch.tensor(inside))


def test_nothing_and_everything_inside_pass() -> None:
    check_bounds(torch.tensor([0, 5]), 6, "index")
    check_bounds(torch.empty(0, dtype=torch.int64), 6, "index")


def test_the_assertion_on_a_device_fails_where_any_is_wrong() -> None:
    assert_none(torch.tensor([False, False]), "Target is outside of 6 entries")
    with pytest.raises(RuntimeError, match="Target is outside of 6 entries"):
        assert_none(torch.tensor([False, True]), "Target is outside of 6 entries")
