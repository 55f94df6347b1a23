"""One line of a plan as people read it: a module, how it is split, and the collectives it costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModuleRow:
    """One line of the plan.

    Attributes:
        name: dotted name of the module.
        style: how it is split.
        global_shape: logical shape of its weight.
        local_shape: shape of its weight here.
        forward: collectives it starts forward.
        backward: collectives it starts backward.
        note: adaptations, or why something is gathered.
    """

    name: str
    style: str
    global_shape: tuple[int, ...] | None
    local_shape: tuple[int, ...] | None
    forward: str = ""
    backward: str = ""
    note: str = ""
