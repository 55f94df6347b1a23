"""Refuses what context parallelism cannot be combined with, before any work starts."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_megatron.context_parallel.region import check_options
from lightning_megatron.strategy.options.together import check_module_with, check_options_with, check_size, refuse_with

_WITHOUT_CONTEXT = {
    "compile_layers": False,
    "record_timeline": False,
    "overlap_parameter_gather": False,
    "gradient_reduce_dtype": None,
    "nonfinite": None,
    "layout": None,
    "topology": None,
}
"""Options that cannot be combined with context ranks, and the only values that do."""


PRECISIONS = ("64-true", "32-true", "bf16-mixed", "16-mixed", "bf16-true")
"""What context ranks compute in."""


def check_context(options: Any) -> None:
    """Refuse an invalid context-parallel size, and options that cannot be combined with context ranks.

    Raises:
        ValueError: with both options.
    """
    size = options.context_parallel_size
    check_size("context_parallel_size", size)
    if size > 1:
        check_options_with(f"context_parallel_size={size}", options, _WITHOUT_CONTEXT, "context_parallel_size=1")
    if size > 1 and options.sequence_parallel:
        given = f"sequence_parallel=True, context_parallel_size={size}"
        check_options_with(given, options, {"random_streams": "torch"}, "sequence_parallel=False")
    check_options(size, options.context_parallel_options)


def check_context_run(size: int, precision: str, module: pl.LightningModule) -> None:
    """Refuse modules whose gradients, or precision, context ranks do not know how to put together.

    Raises:
        MisconfigurationException: with what to change.
    """
    if size == 1:
        return
    given = f"context_parallel_size={size}"
    if precision not in PRECISIONS:
        refuse_with(given, f"`precision={precision!r}`: it computes in {', '.join(map(repr, PRECISIONS))}")
    check_module_with(
        given,
        module,
        by_hand="gradients taken inside of a step are those of a rank's own tokens",
        compiled="compiled code does not see that a tensor's tokens are split",
    )
