"""What context parallelism does not go together with, refused before any work starts."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron.context_parallel.region import check_options
from lightning_megatron.data_parallel.presplit import splits_itself

_WITHOUT_CONTEXT = {
    "sequence_parallel": False,
    "compile_layers": False,
    "record_timeline": False,
    "overlap_parameter_gather": False,
    "gradient_reduce_dtype": None,
    "nonfinite": None,
    "layout": None,
    "topology": None,
}
"""Options that do not go together with context ranks, and the only values that do."""


def check_context(options: Any) -> None:
    """Refuse a context-parallel size that is none, and options that do not go together with context ranks.

    Raises:
        ValueError: with both options.
    """
    size = options.context_parallel_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"`context_parallel_size={size!r}` must be an integer of at least 1.")
    for name, only in _WITHOUT_CONTEXT.items() if size > 1 else ():
        if getattr(options, name) != only:
            raise ValueError(
                f"`context_parallel_size={size}` does not go together with `{name}={getattr(options, name)!r}`; use "
                f"`{name}={only!r}`, or `context_parallel_size=1`."
            )
    check_options(size, options.context_parallel_options)


def check_context_run(size: int, precision: str, module: pl.LightningModule) -> None:
    """Refuse modules whose gradients, or precision, context ranks do not know how to put together.

    Raises:
        MisconfigurationException: with what to change.
    """
    if size == 1:
        return
    wrong = None
    if precision not in ("32-true", "64-true"):
        wrong = f"`precision={precision!r}`: it computes in '32-true' and '64-true'"
    elif not module.automatic_optimization:
        wrong = "`automatic_optimization=False`: gradients taken inside of a step are those of a rank's own tokens"
    elif splits_itself(module):
        wrong = "a module whose own `configure_model` has split it"
    elif any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules()):
        wrong = "`torch.compile`: compiled code does not see that a tensor's tokens are split"
    if wrong is not None:
        raise MisconfigurationException(f"`context_parallel_size={size}` does not go together with {wrong}.")
