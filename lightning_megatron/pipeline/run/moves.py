"""A stage's program as calls: each slot with what runs it, and announcements of final gradients around backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from lightning_megatron.pipeline.run.finality import Final
from lightning_megatron.pipeline.run.program import Action, Slot

Move = tuple[Callable[[Slot], None], Slot]
Program = list[Move]


def bind(
    slots: Iterable[Slot],
    actions: Mapping[Action, Callable[[Slot], None]],
    finals: Mapping[int, Final],
    announce: Callable[[Final, Slot], None],
) -> Program:
    """The calls of a program, in its order.

    Args:
        slots: the program.
        actions: what runs each action.
        finals: position of a backward -> which gradients are final after it; others announce nothing.
        announce: says so before the backward, and takes it back after it.
    """
    program: Program = []
    for slot in slots:
        final = finals.get(slot.position, False)
        announced = bool(final) and slot.action.name.startswith("BACKWARD")
        note = replace(slot, action=Action.FINAL)
        if announced:
            program.append((partial(announce, final), note))
        program.append((actions[slot.action], slot))
        if announced:
            program.append((partial(announce, False), note))
    return program
