"""When one rank raises, dies or is cut off, every rank ends within fifteen seconds and says who it was and why."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.harness import Outcome, run_trainers
from tests.mesh.failure_scenarios import PLACES, fail, lose_the_store, train_hanging, train_killed, train_uneven

SECONDS = 15.0  # from the first rank's end to that of the last; the harness kills those that take longer
WIDE = pytest.mark.wide


def _everything_said(outcome: Outcome) -> str:
    return f"{outcome.error}\n{outcome.trace}\n{outcome.output}"


def _check(outcomes: list[Outcome], culprit: int, place: str) -> None:
    where = f"deliberate failure in {place}"
    assert outcomes[culprit].error == f"ArithmeticError: {where}", _everything_said(outcomes[culprit])
    for outcome in outcomes:
        said = _everything_said(outcome)
        assert not outcome.ok, f"rank {outcome.rank} ended as if nothing had happened"
        assert "killed while running" not in said, f"rank {outcome.rank} had to be killed\n{outcome.stacks}"
        if outcome.rank != culprit:
            assert f"rank {culprit} (pipeline" in said, said
            assert where in said and "Traceback" in said and "_scenarios.py" in said, said


def _cases() -> list[Any]:
    """Every place with one culprit, and on request with the other too."""
    cases = []
    for index, place in enumerate(PLACES):
        cases.append(pytest.param(place, index % 2))
        cases.append(pytest.param(place, 1 - index % 2, marks=WIDE))
    return cases


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("place", "culprit"), _cases())
def test_one_rank_fails_and_the_other_stage_names_it(place: str, culprit: int) -> None:
    outcomes = run_trainers(fail, (2, 1), culprit, place, devices=2, check=False, grace=SECONDS, deadline=90)
    _check(outcomes, culprit, place)


@pytest.mark.parametrize("culprit", [0, pytest.param(3, marks=WIDE)])
def test_one_rank_of_four_fails_and_all_the_others_name_it(culprit: int) -> None:
    outcomes = run_trainers(fail, (2, 2), culprit, "training_step", devices=4, check=False, grace=SECONDS, deadline=90)
    _check(outcomes, culprit, "training_step")


@pytest.mark.parametrize(
    ("sizes", "culprit", "stopped", "misses"),
    [
        ((2, 1, 1), 1, False, "forward pass of micro-batch 0, virtual stage 1: message of "),
        pytest.param((2, 1, 1), 0, True, "message of ", marks=WIDE),
        pytest.param((2, 1, 1), 0, False, "backward pass of micro-batch 0, virtual stage 0: message of ", marks=WIDE),
        pytest.param((1, 2, 1), 1, False, " over ranks 0, 1", marks=WIDE),
        pytest.param((1, 1, 2), 0, False, "`all_reduce` of 2×8×12 float64 over ranks 0, 1: messages of", marks=WIDE),
    ],
)
def test_a_rank_that_stops_taking_part_is_named_by_the_others_with_its_line_and_what_it_misses(
    sizes: tuple[int, ...], culprit: int, stopped: bool, misses: str
) -> None:
    outcomes = run_trainers(train_hanging, sizes, culprit, stopped, devices=2, check=False, grace=SECONDS, deadline=90)
    for outcome in outcomes:
        said = _everything_said(outcome)
        if outcome.rank != culprit or not stopped:
            assert not outcome.ok and "killed while running" not in said, said
            assert f"rank {culprit} (pipeline" in said and "taken no part" in said, said
            assert ("does not answer" in said) if stopped else ("hang_in_a_layer" in said), said
            missed = next(line for line in said.splitlines() if "It misses the " in line)
            assert misses in missed, missed


@pytest.mark.parametrize(
    ("sizes", "culprit"),
    [((2, 1), 1), pytest.param((1, 2), 0, marks=WIDE), pytest.param((2, 2), 2, marks=WIDE)],
)
def test_a_killed_rank_is_named_with_its_signal(sizes: tuple[int, int], culprit: int) -> None:
    devices = sizes[0] * sizes[1]
    outcomes = run_trainers(train_killed, sizes, culprit, devices=devices, check=False, grace=SECONDS, deadline=90)
    for outcome in outcomes:
        said = _everything_said(outcome)
        assert not outcome.ok and "killed while running" not in said, said
        if outcome.rank != culprit:
            assert f"rank {culprit} (pipeline" in said and "was killed by signal 9 (SIGKILL)" in said, said
            others = set(range(devices)) - {culprit, outcome.rank}  # a rank may say of itself that it ends
            assert not any(f"rank {other} (pipeline" in said for other in others), said


@pytest.mark.parametrize(
    ("sizes", "loop"),
    [((1, 2), "train"), pytest.param((1, 2), "val", marks=WIDE), pytest.param((2, 1), "train", marks=WIDE)],
)
def test_ranks_with_different_numbers_of_batches_are_refused_on_every_rank(sizes: tuple[int, int], loop: str) -> None:
    outcomes = run_trainers(train_uneven, sizes, loop, devices=2, check=False, grace=SECONDS, deadline=90)
    for outcome in outcomes:
        said = _everything_said(outcome)
        assert not outcome.ok and "killed while running" not in said, said
        assert "rank 1's loader ended after 1 batch, rank 0's" in said, said
        assert loop == "val" or "rank 0's after 4" in said, said


@pytest.mark.wide
def test_replicas_may_evaluate_different_numbers_of_batches_where_nothing_is_exchanged() -> None:
    assert [outcome.value for outcome in run_trainers(train_uneven, (1, 2), "val", False, devices=2)] == [8, 8]


def test_a_rank_whose_store_does_not_answer_ends_by_itself() -> None:
    (outcome,) = run_trainers(lose_the_store, 2.0, devices=1, check=False, grace=SECONDS, deadline=60)
    said = _everything_said(outcome)
    assert "ALIVE BEFORE THE LINK WENT SILENT" in said and "exit code 1" in said, said
    assert "rank 1 (pipeline 0, data 1, tensor 0) ends because the process that hosts the store" in said, said
    silent = re.search(r"has not answered for (\d+) s \(`hang_timeout`\)", said)
    assert silent is not None and int(silent[1]) > 2, said  # the timeout; how much later depends on the machine
