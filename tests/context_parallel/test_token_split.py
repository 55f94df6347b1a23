"""Tokens are dealt out to ranks without a rest, and causal work evenly."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatron.context_parallel.token_split import (
    BALANCES,
    TokenSplit,
    block_runs,
    in_two_levels,
    zigzag_runs,
)


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


class Group:
    """Ranks, seen from one."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)


def test_two_levels_are_those_of_the_example():
    splits = [
        in_two_levels(TokenSplit(Group(r, 4), 8, zigzag_runs(8, 4)), Group(r % 2, 2), Group(r // 2, 2))  # type: ignore[arg-type]
        for r in range(4)
    ]
    assert splits[0][0].runs == splits[1][0].runs == (((0, 1), (3, 4)), ((1, 3),))
    assert all(around.runs == (((0, 2), (6, 8)), ((2, 6),)) for _, around in splits)
