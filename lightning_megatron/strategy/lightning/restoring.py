"""Restores a checkpoint where Lightning does it for one process: before ``on_fit_start``, as ``fit`` was told to.

A rank knows which tensors it holds once ``MegatronStrategy.setup`` has divided the module. Lightning restores either
before that or, where ``restore_checkpoint_after_setup`` says so, after ``on_fit_start``. By then callbacks and modules
have looked at weights and states that are not loaded yet, and the ``weights_only`` that ``fit`` was given is lost. So
Lightning is let ask for it before the setup, and is answered at the end of that::

    Lightning for one process     setup hook, restore, strategy.setup, on_fit_start, optimizers restored
    here                          setup hook, strategy.setup and restore, on_fit_start, optimizers restored

The setup also converts the module to the precision of the run. Lightning rounds loaded weights of float64 to a module
that was built in float32 before it converts that; here they are loaded as they were saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_megatron.mesh.replaced import Replacement, Replacements
from lightning_megatron.strategy.lightning.trainer_access import callbacks_of

_RESTORE = "_restore_modules_and_callbacks"


class _WhenSetUp(Replacement):
    """Stands for the Lightning method that restores modules and callbacks.

    Args:
        connector: whose method it is.
    """

    def __init__(self, connector: Any) -> None:
        super().__init__(connector, _RESTORE)
        self._restore: Callable[..., None] = getattr(connector, _RESTORE)
        self._asked: tuple[Any, ...] | None = None

    def __call__(self, *args: Any) -> None:
        self._asked = args

    def now(self) -> None:
        """Restore what has been asked for, once."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self._restore(*asked)


@contextmanager
def restores_when_set_up(trainer: pl.Trainer) -> Iterator[None]:
    """Within, a Trainer restores when its strategy calls :func:`restore_now`.

    Raises:
        AttributeError: this version of Lightning restores by another method.
    """
    connector = trainer._checkpoint_connector
    with Replacements() as replaced:
        replaced.put(connector, _RESTORE, _WhenSetUp(connector))
        replaced.put(trainer.strategy, "restore_checkpoint_after_setup", False)
        yield


def restore_now(trainer: pl.Trainer, *, whole: bool) -> None:
    """Restore modules and callbacks from the checkpoint that this run was given, if it was given one.

    Args:
        trainer: of the run.
        whole: whether all layers are here. Where they are not, ``BaseFinetuning`` leaves the parameter groups to the
            strategy: in ``on_fit_start`` it would give them the first stage's parameters, which is what it has noted.
    """
    awaited = trainer._checkpoint_connector.__dict__.get(_RESTORE)
    if isinstance(awaited, _WhenSetUp):
        awaited.now()
    for callback in () if whole else callbacks_of(trainer):
        if isinstance(callback, BaseFinetuning):
            callback._restarting = False
