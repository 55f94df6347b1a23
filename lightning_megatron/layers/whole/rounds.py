"""Split tensors gathered where only some ranks ask for it.

Code under ``if self.trainer.is_global_zero`` reads a split weight on one rank, and gathering it takes all of them. So
every reading is announced, and ranks that are done answer until nobody asks::

    rank 0   reads tensor 4 ── round: 4, none ── gather 4 ── is done ── round: none, none
    rank 1   is done        ── round: 4, none ── gather 4 ───────────── round: none, none

A rank may also announce a call that all have to make (:mod:`lightning_megatron.strategy.hooks.served_calls`). The
others make it, and tensors that are asked for in the same round are gathered in the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.layers.whole.parameter_parts import ParameterParts
from lightning_megatron.mesh.watch import waits

NOTHING, CALL = -1.0, -2.0
_LOOK_S = 1e-4


class Rounds:
    """Rounds of one group.

    Args:
        group: its ranks.
        part: number of a tensor, and the note of the rank that asks -> how it is split, and this rank's part.
        patience_s: a rank that asks gives up after so many seconds; ``None``: never.

    Attributes:
        group: the same.
        serve: makes a call that some ranks announce, whose places in the group and notes it is given; set by whoever
            announces any.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        part: Callable[[int, float], tuple[ParameterParts, Tensor]],
        patience_s: float | None = None,
    ) -> None:
        self.group, self._part, self._patience_s = group, part, patience_s
        self.serve: Callable[[Sequence[tuple[int, float]]], None] | None = None

    def ask(self, number: float, note: float, device: torch.device, name: str = "") -> tuple[Any, list[list[float]]]:
        """Gather what any rank asks for.

        Args:
            number: of the tensor that this rank reads, or `NOTHING`; `CALL` for a call.
            note: a number that all ranks are told.
            device: of the tensors.
            name: of the tensor, for messages.

        Returns:
            The whole tensor, or ``None`` where none was asked for, and number and note of every rank.

        Raises:
            RuntimeError: another rank does not come to answer.
        """
        mine, found = torch.tensor([number, note], dtype=torch.float64, device=device), None
        while True:
            notes = self._exchange(mine, name)
            calls = [(rank, told) for rank, (asked, told) in enumerate(notes) if asked == CALL]
            if number == CALL or not calls or self.serve is None:
                break
            self.serve(calls)
            if number == NOTHING:
                return None, notes
        if calls:
            return None, notes
        for asked, told in sorted({(asked, told) for asked, told in notes if asked != NOTHING}):
            parts, part = self._part(int(asked), told)
            whole = parts.gather(part)
            found = whole if asked == number else found
        return found, notes

    def _exchange(self, mine: Tensor, name: str) -> list[list[float]]:
        everyone = [torch.empty_like(mine) for _ in range(self.group.size())]
        work: Any = dist.all_gather(everyone, mine, group=self.group, async_op=True)
        until = time.monotonic() + (self._patience_s or 0.0)
        with waits.on(waits.collective, "all_gather", mine, self.group):
            while name and self._patience_s is not None and not work.is_completed():
                if time.monotonic() > until:
                    raise RuntimeError(
                        f"`{name}` is split over {self.group.size()} ranks, of which rank {dist.get_rank()} reads it. "
                        f"The others have not come to the end of their step within {self._patience_s:g} s: layers that "
                        "run after this line wait for this rank. Read it on every rank, or after the last layer has "
                        "run."
                    )
                time.sleep(_LOOK_S)
            work.wait()
        return [entry.tolist() for entry in everyone]


def refuse_other_threads(thread: int, parts: ParameterParts) -> None:
    """Stop code that reads a split tensor in another thread than ``thread``, where the ranks do not meet.

    Raises:
        RuntimeError: it does.
    """
    if threading.get_ident() != thread:
        raise RuntimeError(
            f"`{parts.name}` is read in a thread of its own while a step or a hook runs. It is split over "
            f"{len(parts.specs)} ranks, which put it together only where all of them read it. Read it in the step or "
            "hook itself, and hand a copy (`.detach().clone()`) to the thread."
        )
