"""Says, where memory does not suffice, what of the run is large there, and which options would save most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lightning_megatron.data_parallel.model_gradients import ModelGradients
from lightning_megatron.strategy.memory.ledger import KINDS, Bytes, held, size_words

if TYPE_CHECKING:
    from lightning_megatron.strategy.memory.expected import OptionSaving

_SAID = ("not enough memory", "can't allocate memory", "out of memory")
_BEGINS = "lightning_megatron: out of memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or this host, has no more memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


class TooLarge:
    """Adds a note to errors of memory.

    Args:
        trainer: of the run.
        gradients: of its module.
        optimizers: with this rank's parameters.
        place: of this rank, in words.
    """

    def __init__(
        self, trainer: pl.Trainer, gradients: ModelGradients, optimizers: Sequence[Optimizer], place: str
    ) -> None:
        self._trainer, self._gradients, self._optimizers, self._place = trainer, gradients, list(optimizers), place

    def __call__(self, error: BaseException) -> None:
        """Add the note, once, if the error is one of memory."""
        if not is_out_of_memory(error) or any(note.startswith(_BEGINS) for note in getattr(error, "__notes__", ())):
            return
        try:
            error.add_note(self._note())
        except Exception as failed:  # must not hide the error that it explains
            error.add_note(f"{_BEGINS} on {self._place}; what would help could not be found out: {failed}")

    def _note(self) -> str:
        from lightning_megatron.strategy.memory.expected import expected, held_savings, savings  # imports the planner

        strategy: Any = self._trainer.strategy
        module, layout = self._trainer.lightning_module, strategy.mesh.layout
        here = held(module, self._gradients, self._optimizers, strategy.root_device)
        found, stage = expected(self._trainer, module), strategy.mesh.coordinates.pipeline
        if isinstance(found, str):
            helps = held_savings(strategy.options, here, layout.data * layout.context)
            known = f"It keeps {_kinds(here)} from step to step (the planner counts no activations here: {found})"
        else:
            helps = savings(strategy.options, found, stage)
            known = f"The planner expects {_kinds(found.bytes_of(stage))} at the fullest moment of a step"
        lines = [f"{_BEGINS} on {self._place}. {known}.", *_lines(helps)]
        return "\n".join([*lines, "docs/memory.md, `My model does not fit`, says what each of them costs."])


def _kinds(bytes_: Bytes) -> str:
    kinds = [f"{kind} {size_words(getattr(bytes_, kind))}" for kind in KINDS if getattr(bytes_, kind)]
    return f"{size_words(bytes_.total)} ({', '.join(kinds)})"


def _lines(helps: Sequence[OptionSaving]) -> list[str]:
    if not helps:
        return ["No option of the strategy would save much here: use more devices, or a smaller model."]
    width = max(len(each.arguments) for each in helps)
    return ["What would save most there:", *(f"  {each.arguments:{width}}  {size_words(each.bytes)}" for each in helps)]
