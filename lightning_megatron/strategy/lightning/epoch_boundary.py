"""A run that stopped around the end of an epoch goes on with what was outstanding there, and counts on rightly.

A checkpoint is often saved after the last batch of an epoch, when its validation and its ``on_train_epoch_end`` are
still to come; or after them; or after a fit that ``max_steps`` ended in the middle of an epoch. Lightning 2.6 then
leaves out the validation, or the hooks of the next epoch, and counts one epoch less from there on::

    saved        in the epoch    after its last batch   after its end
    goes on      next batch      validation, epoch end   next epoch

The counters are put right before Lightning loads them, and its notes on how to restart just before the first epoch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.evaluation_loop import RestartStage


class SavedAt(enum.Enum):
    """Point of an epoch at which a checkpoint was saved."""

    INSIDE = "batches of the epoch are left"
    LAST_BATCH = "its batches are consumed, its validation is outstanding"
    VALIDATED = "its batches are consumed and validation has run or is running, its end is outstanding"
    OVER = "the epoch has ended, and the next has no batch yet"


def place_of(loops: Mapping[str, Any]) -> SavedAt:
    """Point of the epoch at which the run was saved that ``loops`` is from."""
    fit = loops["fit_loop"]
    progress, epochs = fit["epoch_loop.batch_progress"], fit["epoch_progress"]["current"]
    batches = progress["current"]
    if batches["processed"] == 0 or epochs["started"] < epochs["ready"]:
        return SavedAt.OVER
    if not progress["is_last_batch"]:
        return SavedAt.INSIDE
    if epochs["ready"] <= epochs["processed"]:
        return SavedAt.OVER
    return SavedAt.LAST_BATCH if batches["completed"] < batches["processed"] else SavedAt.VALIDATED


def consumed_batches(loops: Mapping[str, Any]) -> tuple[int, int]:
    """The epoch that a saved run fetches its next batch in, and the batches of it that were consumed."""
    fit = loops["fit_loop"]
    epochs = fit["epoch_progress"]["current"]
    place = place_of(loops)
    if place is SavedAt.INSIDE:  # the end of a fit counts an epoch as processed that it has cut short
        cut_short = epochs["ready"] <= epochs["processed"]
        return int(epochs["processed"]) - cut_short, int(fit["epoch_loop.batch_progress"]["current"]["processed"])
    return int(epochs["processed"]) + (place is not SavedAt.OVER), 0


def set_counters(loops: Mapping[str, Any]) -> None:
    """Let the saved counters tell Lightning what :func:`place_of` says, in place."""
    fit, place = loops["fit_loop"], place_of(loops)
    epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    epoch, _ = consumed_batches(loops)
    if place in (SavedAt.LAST_BATCH, SavedAt.VALIDATED):
        for counter in (batches["current"], batches["total"]):
            counter["completed"] = counter["processed"]
        return
    begun = epoch + (place is SavedAt.INSIDE)
    shift = epochs["total"]["ready"] - epochs["current"]["ready"]
    for counter, more in ((epochs["current"], 0), (epochs["total"], shift)):
        counter |= {
            "ready": begun + more,
            "started": begun + more,
            "processed": epoch + more,
            "completed": epoch + more,
        }


def go_on(trainer: pl.Trainer, place: SavedAt) -> None:
    """Do what is outstanding, or let the loops do it; called once they are ready for their first epoch."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if place is SavedAt.INSIDE:
        _validate_first(fit, epoch)
        return
    if place is not SavedAt.OVER:
        assert fit._data_fetcher is not None
        if epoch._should_check_val_fx(fit._data_fetcher):
            if place is SavedAt.LAST_BATCH:
                _begin_with_validation(epoch)
            return
        epoch._batches_that_stepped += 1  # as the loop does after the batch, and before the epoch's end
        fit.on_advance_end()
        fit.on_iteration_done()
    for loop in (fit, epoch, epoch.automatic_optimization, epoch.manual_optimization, epoch.val_loop):
        loop._restarting = False
        loop.reset_restart_stage()


def _validate_first(fit: Any, epoch: Any) -> None:
    """Make up for a validation in the middle of an epoch that was to follow the batch after which was saved."""
    batches = epoch.batch_progress.current
    if batches.completed < batches.processed and epoch._should_check_val_fx(fit._data_fetcher):
        _begin_with_validation(epoch)
        epoch._batches_that_stepped -= 1  # the loop counts the batch when it restarts, and after validation again


def _begin_with_validation(epoch: Any) -> None:
    epoch.val_loop.restarting = False
    epoch.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
