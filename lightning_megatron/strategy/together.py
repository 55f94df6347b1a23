"""What does not go together with a way of spreading the model: questions that each of them asks, refused alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron.data_parallel.presplit import splits_itself


def check_size(name: str, size: Any) -> None:
    """Refuse a number of ranks that is none.

    Args:
        name: of the option.
        size: its value.

    Raises:
        ValueError: with both.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"`{name}={size!r}` must be an integer of at least 1.")


def check_options_with(given: str, options: Any, only: Mapping[str, Any], without: str) -> None:
    """Refuse options of which only one value goes together with what is given.

    Args:
        given: the option that spreads the model, with its value.
        options: all of the strategy's.
        only: other options, each with the value that goes together with it.
        without: the option with the value that spreads nothing.

    Raises:
        ValueError: with both options.
    """
    for name, value in only.items():
        if getattr(options, name) != value:
            raise ValueError(
                f"`{given}` does not go together with `{name}={getattr(options, name)!r}`; use `{name}={value!r}`, or "
                f"`{without}`."
            )


def check_module_with(given: str, module: pl.LightningModule, *, by_hand: str, compiled: str) -> None:
    """Refuse modules that take gradients themselves, have split themselves, or are compiled.

    Args:
        given: the option that spreads the model, with its value.
        module: the user's.
        by_hand: why not with manual optimization.
        compiled: why not where code is compiled.

    Raises:
        MisconfigurationException: with what of it does not go together.
    """
    if splits_itself(module):
        refuse_with(given, "a module whose own `configure_model` has split it; leave that to the strategy")
    if not module.automatic_optimization:
        refuse_with(given, f"`automatic_optimization=False`: {by_hand}")
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules()):
        refuse_with(given, f"`torch.compile`: {compiled}")


def refuse_with(given: str, wrong: str) -> NoReturn:
    """Refuse what does not go together.

    Args:
        given: the option that spreads the model, with its value.
        wrong: what does not go together with it, and why.

    Raises:
        MisconfigurationException: always.
    """
    option = given.partition("=")[0]
    raise MisconfigurationException(f"`{given}` does not go together with {wrong}. Otherwise leave `{option}` out.")
