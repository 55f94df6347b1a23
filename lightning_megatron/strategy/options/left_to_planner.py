"""The planner's choices and inputs; refuses a layout that is both given and left to it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

FACTS = ("batch_size", "seq", "heads", "shape", "cluster")
"""What the planner has to know of a run, and can be told with ``layout_options``."""


CHOSEN = (
    *("pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size", "sequence_parallel"),
    *("micro_batch_size", "pipeline_schedule", "virtual_pipeline_parallel_size", "activation_recompute"),
)
"""Options that ``layout="auto"`` chooses, which therefore must not be given beside it."""


def check_layout(options: Any) -> None:
    """Refuse a layout that is both left to the planner and given, and options of the planner that it has not."""
    if options.layout not in (None, "auto"):
        raise ValueError(f"`layout={options.layout!r}` must be 'auto' or left out.")
    defaults = {field.name: field.default for field in fields(options) if field.name in CHOSEN}
    given = [name for name, value in defaults.items() if getattr(options, name) != value]
    if options.layout == "auto" and given:
        name = given[0]
        raise ValueError(
            f"`layout='auto'` chooses `{name}`, but `{name}={getattr(options, name)!r}` is given; leave it out, or "
            "limit the search with `layout_options={'tensor': ..., 'pipeline': ..., 'micro_batch': ..., "
            "'schedules': (...)}`."
        )
    if not options.layout_options:
        return
    from lightning_megatron.planner import Limits  # takes time to import, and most runs ask for nothing

    known = {*FACTS, *(field.name for field in fields(Limits))}
    if unknown := sorted(set(options.layout_options) - known):
        raise ValueError(f"`layout_options` has {unknown}; known options are {', '.join(sorted(known))}.")
    if not options.asks_the_planner:
        raise ValueError("`layout_options` is given without `layout='auto'` or `topology`; leave it out.")
