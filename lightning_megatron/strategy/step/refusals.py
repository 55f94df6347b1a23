"""Refusals of modules that cannot be divided: cut or split for another layout before, or split by their own code."""

from __future__ import annotations

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


def already_split(before: int, tensor: int) -> str:
    """Message for a module that another layout's run has split over tensor-parallel ranks."""
    return (
        f"this module was set up for `tensor_parallel_size={before}` by an earlier run and holds this rank's part; a "
        f"run with `tensor_parallel_size={tensor}` needs a new module. Build it again and load the checkpoint."
    )
