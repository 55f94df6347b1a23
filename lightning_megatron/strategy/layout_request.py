"""What a strategy asks of the planner: ``layout="auto"``, ``layout_options`` and ``topology``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_megatron.planner.topology import Placement, Topology

FACTS = ("batch_size", "seq", "heads", "shape", "cluster")
"""What the planner has to know of a run, and can be told."""


@dataclass(frozen=True)
class Choice:
    """What ``layout="auto"`` and ``topology`` ask for.

    Args:
        auto: whether the planner chooses the layout.
        options: facts (``batch_size`` per replica, ``seq``, ``heads``, ``shape``, ``cluster``) not to be detected, and
            :class:`~lightning_megatron.planner.Limits` of the search by name.
        topology: the machine's islands, or a placement on them.

    Raises:
        ValueError: an option is unknown, or given without need.
    """

    auto: bool
    options: Mapping[str, Any]
    topology: Topology | Placement | None

    def __post_init__(self) -> None:
        if not self.options:
            return
        from lightning_megatron.planner import Limits  # takes time to import, and most runs ask for nothing

        known = {*FACTS, *(field.name for field in fields(Limits))}
        if unknown := sorted(set(self.options) - known):
            raise ValueError(f"`layout_options` has {unknown}; known options are {', '.join(sorted(known))}.")
        if not self.auto and self.topology is None:
            raise ValueError("`layout_options` is given without `layout='auto'` or `topology`; leave it out.")

    @property
    def asks(self) -> bool:
        """Whether there is anything to settle."""
        return self.auto or self.topology is not None


def check_layout(layout: Any, sizes: Mapping[str, Any]) -> bool:
    """Whether ``layout`` asks for the planner.

    Args:
        layout: the strategy's argument.
        sizes: arguments that the planner would choose, where they differ from their defaults.

    Raises:
        ValueError: ``layout`` is not known, or a size is given besides it.
    """
    if layout not in (None, "auto"):
        raise ValueError(f"`layout={layout!r}` must be 'auto' or left out.")
    if layout == "auto" and sizes:
        name = next(iter(sizes))
        raise ValueError(
            f"`layout='auto'` chooses `{name}`, but `{name}={sizes[name]!r}` is given; leave it out, or limit the "
            "search with `layout_options={'tensor': ..., 'pipeline': ..., 'micro_batch': ..., 'schedules': (...)}`."
        )
    return layout == "auto"
