"""A signal on any rank ends the run on all of them at the same step, with a whole checkpoint to go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints.reshard_scenarios import END, Grid
from tests.harness import run_trainers
from tests.strategy.preemption_scenarios import told_to_requeue, told_to_stop

WIDE = pytest.mark.wide
GRIDS = [
    pytest.param(Grid(pipeline=2), 1, False),
    pytest.param(Grid(pipeline=2), 0, True, marks=WIDE),
    pytest.param(Grid(data=2), 1, True),
    pytest.param(Grid(tensor=2), 1, False, marks=WIDE),
    pytest.param(Grid(tensor=2, pipeline=2), 3, False, marks=WIDE),
    pytest.param(Grid(pipeline=2, data=2), 2, True, marks=WIDE),
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("grid", "rank", "on_exception"), GRIDS)
def test_a_request_to_stop_on_one_rank_saves_and_ends_all(
    grid: Grid, rank: int, on_exception: bool, tmp_path: Path
) -> None:
    outcomes = run_trainers(told_to_stop, grid, rank, str(tmp_path), on_exception, devices=grid.ranks)
    first = outcomes[0].value
    for outcome in outcomes:
        ended, name, before, after = outcome.value
        assert ended, "by the signal"
        assert name and name == first[1]
        assert len(before) == 4 and len(before) + len(after) == END, "stopped after the step that the signal came in"
        assert before == first[2] and after == first[3]


def test_slurms_signal_saves_between_two_steps_and_training_goes_on(tmp_path: Path) -> None:
    for outcome in run_trainers(told_to_requeue, Grid(pipeline=2), 1, devices=2):
        name, losses, rest = outcome.value
        assert name == "hpc_ckpt_1.ckpt"
        assert len(losses) == END and rest == losses[4:]
