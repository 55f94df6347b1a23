"""Tokens are dealt out to ranks without a rest, and causal work evenly."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatron.context_parallel.token_split import BALANCES, TokenSplit, block_runs, zigzag_runs


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [4, 7, 8, 23, 24])
def test_every_token_is_on_one_rank(length, ranks):
    for deal in BALANCES.values():
        runs = deal(length, ranks)
        tokens = [token for own in runs for start, stop in own for token in range(start, stop)]
        assert sorted(tokens) == list(range(length))
        assert all(list(own) == sorted(own) for own in runs)


def test_runs_are_those_of_the_drawing():
    assert zigzag_runs(11, 2) == (((0, 2), (8, 11)), ((2, 8),))
    assert block_runs(11, 2) == (((0, 5),), ((5, 11),))


@pytest.mark.parametrize(("length", "most"), [(24, 1.0), (23, 1.02)])
def test_zigzag_shares_causal_work_evenly(length, most):
    work = [sum(token + 1 for start, stop in own for token in range(start, stop)) for own in zigzag_runs(length, 4)]
    split: Any = TokenSplit(None, length, zigzag_runs(length, 4))  # type: ignore[arg-type]
    assert split.causal_balance == pytest.approx(max(work) / (sum(work) / 4))
    assert split.causal_balance <= most
