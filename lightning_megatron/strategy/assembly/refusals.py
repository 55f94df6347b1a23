"""Refusals of modules that cannot be divided: cut or split for another layout before, or split by their own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron.pipeline.stage.stage import Stage


def check_own_split(**options: tuple[Any, Any]) -> None:
    """Refuse options that would be ignored for a module that has split itself with ``parallelize_module`` or
    ``fully_shard``.

    Args:
        options: name of an option -> its value, and the only value that fits.

    Raises:
        MisconfigurationException: with the option to change.
    """
    for name, (value, wanted) in options.items():
        if value != wanted:
            raise MisconfigurationException(
                f"`{name}={value!r}` does not fit a module whose own `configure_model` has split it (its parameters "
                f"are DTensors): use `{name}={wanted!r}`, or leave the splitting to this strategy."
            )


def already_cut(earlier: Stage, stages: int) -> str:
    """Message for a module that another layout's run has cut."""
    before = earlier.presence.stages
    return (
        f"this module was cut for {before} pipeline stages by an earlier run and holds only stage {earlier.stage}; a "
        f"run with {stages} stages needs a new module. Build it again and load the checkpoint."
    )


def already_split(option: str, before: int | str, now: int | str) -> str:
    """Message for a module that another layout's run has split, by ``option``."""
    return (
        f"this module was set up for `{option}={before}` by an earlier run and holds this rank's part; a "
        f"run with `{option}={now}` needs a new module. Build it again and load the checkpoint."
    )


def check_by_hand(*, record_timeline: bool) -> None:
    """Refuse what steps of manual optimization through several stages do not do.

    Raises:
        MisconfigurationException: with the option to leave out.
    """
    if record_timeline:
        raise MisconfigurationException(
            "`record_timeline=True` times the schedule of a step, which manual optimization runs in passes of its own; "
            "leave it out, or set `self.automatic_optimization = True`."
        )


def check_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of a backward that the other stages would not follow.

    Args:
        args: of ``self.manual_backward``, after the loss.
        kwargs: the same, by name.

    Raises:
        ValueError: with the argument to leave out.
    """
    more = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items() if name != "retain_graph")]
    if more:
        raise ValueError(
            f"`self.manual_backward(loss, {more[0]})`: the backward goes through all pipeline stages, which only take "
            "the loss; leave the argument out, or use `pipeline_parallel_size=1`."
        )
