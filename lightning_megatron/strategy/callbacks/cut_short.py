"""Lets all ranks leave an epoch together where ``on_train_batch_start`` of the module returns -1.

One process asks its module once, before each batch. A rank that left alone would wait for the others after the epoch,
and they for it in the batch: each is asked about its own part of it. So where the hook may return something, the ranks
tell each other what it did, and one that has decided otherwise than the rest is refused on all of them.
"""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_megatron.mesh.parts.bytecode import instructions_of
from lightning_megatron.mesh.replaced import Replacements
from lightning_megatron.strategy.lightning.hooks import functions_of
from lightning_megatron.strategy.processes import Processes

_HOOK = "on_train_batch_start"


class CutShort:
    """Compares what a module's hook returns over the ranks, until :meth:`stop`.

    Args:
        module: the user's module.
        processes: connected.
    """

    def __init__(self, module: pl.LightningModule, processes: Processes) -> None:
        self._replaced = Replacements()
        where = _returns(module) if is_overridden(_HOOK, module) else ""
        if where:
            self._replaced.call(module, _HOOK, _compared(getattr(module, _HOOK), processes, where))

    def stop(self) -> None:
        """Give the hook back."""
        self._replaced.take_back()


def _compared(hook: Any, processes: Processes, where: str) -> Any:
    @functools.wraps(hook)
    def compared(*args: Any, **kwargs: Any) -> Any:
        answer = hook(*args, **kwargs)
        with processes.naming_failures():
            votes, ranks = processes.count(bool(answer == -1)), processes.mesh.layout.world_size
            if 0 < votes < ranks:
                raise RuntimeError(
                    f"`{_HOOK}` returned -1 on {votes} of {ranks} ranks only ({where}), where one process is asked "
                    "once, for the batch of all of them, and leaves the epoch or stays in it. Decide alike on every "
                    "rank: by the number of the epoch, step or batch, by a logged value "
                    "(`self.trainer.callback_metrics`), or by what all replicas have (`self.all_gather(x).mean(0)`)."
                )
        return answer

    return compared


def _returns(module: pl.LightningModule) -> str:
    """The line of a hook that may return something else than ``None``; "" if there is none."""
    for function in functions_of(module, _HOOK)[:1]:
        before = None
        for step in instructions_of(function.__code__):
            given = step.argval if step.opname == "RETURN_CONST" else getattr(before, "argval", _HOOK)
            if step.opname.startswith("RETURN_") and step.opname != "RETURN_GENERATOR" and given is not None:
                at = function.__code__.co_firstlineno if step.positions is None else step.positions.lineno
                return f"{function.__code__.co_filename}:{at}"
            before = step
    return ""
