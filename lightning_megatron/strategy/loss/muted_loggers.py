"""Loggers that say nothing while a step is tried, and steps that speak to loggers themselves.

A step may speak to a logger itself (``self.logger.experiment.add_scalar(...)``). What it says in a trial, whose
writes are undone, must not be kept either: a file or a server does not forget.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_megatron.mesh.parts.bytecode import names_in
from lightning_megatron.strategy.lightning.hooks import functions_of

_SPEAKS = frozenset({"experiment", "log_metrics"})


def warn_of_own_words(module: pl.LightningModule, steps: Sequence[str], replicas: int, *, cuts: bool) -> None:
    """Warn of a step that tells a logger itself what one process tells it of a whole batch.

    Args:
        module: the user's, with its Trainer.
        steps: names of the steps that will run.
        replicas: their number.
        cuts: whether batches are cut into micro-batches.
    """
    if not module.trainer.loggers or (replicas == 1 and not cuts):
        return
    for step in steps:
        for function in functions_of(module, step):
            code = function.__code__
            if "logger" not in names_in(code) or _SPEAKS.isdisjoint(names_in(code)):
                continue
            rank_zero_warn(
                f"`{step}` tells a logger something itself ({code.co_filename}:{code.co_firstlineno}): of the "
                "samples of one replica, and for each micro-batch, where one process does so for each batch. Use "
                "`self.log`, whose values are those of the whole batch, or a hook such as `on_train_batch_end`."
            )
            return


@contextmanager
def muted(module: nn.Module) -> Iterator[None]:
    """While it lasts, the loggers of a module's Trainer keep their class and attributes, and write nothing.

    Args:
        module: the user's; nothing happens without a Trainer.
    """
    trainer = getattr(module, "_trainer", None)
    kinds = [(logger, type(logger)) for logger in getattr(trainer, "loggers", ())]
    try:
        for logger, kind in kinds:
            logger.__class__ = _silent(kind)
        yield
    finally:
        for logger, kind in kinds:
            logger.__class__ = kind


def _silent(kind: type) -> type:
    methods = {name: _nothing for name in dir(kind) if name.startswith("log_") and _is_method(kind, name)}
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**methods, **named, "experiment": property(lambda _: DummyExperiment())})


def _is_method(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name), types.FunctionType)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Say nothing."""
