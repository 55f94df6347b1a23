"""A killed run goes on from the newest whole checkpoint, as if nothing had happened; failures of saving are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints.kill_scenarios import GRIDS, kill_again_and_again
from tests.checkpoints.reshard_scenarios import Grid
from tests.checkpoints.save_scenarios import background, cannot_write, failing_background, wrapped
from tests.harness import run_job, run_trainers


@pytest.mark.wide
@pytest.mark.parametrize(("grid", "async_save"), [(0, True), pytest.param(1, False, marks=pytest.mark.wide)])
def test_a_run_killed_at_random_times_ends_with_the_weights_of_an_undisturbed_one(
    grid: int, async_save: bool, tmp_path: Path
) -> None:
    kill_again_and_again(3, 11 + grid, GRIDS[grid], async_save, str(tmp_path), print)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("grid", "async_save"),
    [(Grid(data=2), False), pytest.param(Grid(pipeline=2, data=2), True, marks=pytest.mark.wide)],
)
def test_a_run_whose_optimizer_lies_in_files_goes_on_from_its_checkpoint_to_the_bit(
    grid: Grid, async_save: bool, tmp_path: Path
) -> None:
    """Killed between two buckets of an update, while it writes a checkpoint, and at some time of a step."""
    files = tmp_path / "files"
    offload = {"optimizer_offload": {"to": str(files), "interleave": 2}, "bucket_size_mb": 0.002}
    kill_again_and_again(3, 21, replace(grid, options=offload), async_save, str(tmp_path), print, grid)
    assert list(files.iterdir()) == [], "killed runs leave no files behind"


@pytest.mark.parametrize("kind", ["full", "denied"])
def test_a_rank_that_cannot_write_is_named_and_the_checkpoint_before_stays(kind: str, tmp_path: Path) -> None:
    for outcome in run_trainers(cannot_write, str(tmp_path), kind, devices=2):
        assert outcome.value == ["rank 1 is named", "step 1 is the newest", "nothing is left over"]


def test_a_background_save_lets_training_go_on_and_holds_what_was_when_it_began(tmp_path: Path) -> None:
    for outcome in run_trainers(background, str(tmp_path), devices=2):
        assert outcome.value == {"steps_meanwhile": True, "removed_too_early": False, "loaded_step": 2, "equal": True}


def test_a_background_save_that_fails_is_raised_at_the_next_step(tmp_path: Path) -> None:
    outcomes = run_job(failing_background, 2, str(tmp_path), check=False, grace=30.0)
    assert any("was not saved" in str(outcome.error) and "No space left" in str(outcome.error) for outcome in outcomes)
    assert all("at step 3" in outcome.output for outcome in outcomes if "was not saved" in str(outcome.error))


def test_lightnings_own_asynchronous_plugin_becomes_ours_and_others_are_refused(tmp_path: Path) -> None:
    for outcome in run_trainers(wrapped, str(tmp_path), devices=2):
        assert outcome.value == [True, True, True]
