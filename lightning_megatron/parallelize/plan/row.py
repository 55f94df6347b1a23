"""One row of the report on a plan: a module, how it is split, and its collectives."""

from __future__ import annotations

from dataclasses import dataclass

SEQUENCE_SPLIT = "sequence split"
"""Style of the layer where sequence parallelism begins."""


@dataclass(frozen=True)
class ModuleRow:
    """One row of the report on a plan.

    Attributes:
        name: dotted name of the module.
        style: how it is split.
        global_shape: logical shape of its weight.
        local_shape: shape of its weight on this rank.
        forward: collectives that it starts in the forward.
        backward: collectives that it starts in the backward.
        note: adaptations, or the reason for a gather.
    """

    name: str
    style: str
    global_shape: tuple[int, ...] | None
    local_shape: tuple[int, ...] | None
    forward: str = ""
    backward: str = ""
    note: str = ""
