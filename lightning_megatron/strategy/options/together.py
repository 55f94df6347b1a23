"""Refuses what cannot be combined with a way of spreading the model; each of these ways asks the same questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_megatron.data_parallel.presplit import splits_itself
from lightning_megatron.mesh.layout import Layout
from lightning_megatron.pipeline.forwards.compiled import is_given_compiled
from lightning_megatron.strategy.activations.host_request import host_request
from lightning_megatron.strategy.activations.mlp_pieces import check_chunks


def check_size(name: str, size: Any) -> None:
    """Refuse an invalid number of ranks.

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
                f"`{given}` cannot be combined with `{name}={getattr(options, name)!r}`; use `{name}={value!r}`, or "
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
    if is_given_compiled(module):
        refuse_with(given, f"`torch.compile`: {compiled}")


def refuse_with(given: str, wrong: str) -> NoReturn:
    """Refuse what does not go together.

    Args:
        given: the option that spreads the model, with its value.
        wrong: what cannot be combined with it, and why.

    Raises:
        MisconfigurationException: always.
    """
    option = given.partition("=")[0]
    raise MisconfigurationException(f"`{given}` cannot be combined with {wrong}. Otherwise leave `{option}` out.")


_GIVEN = "random_streams='layout'"
_WITH_LAYOUT = {
    "compile_layers": False,
    "layout": None,
}
"""Options that cannot be combined with draws from counters, and the only values that do."""


def check_draws(options: Any) -> None:
    """Refuse an invalid value of ``random_streams``, and options that cannot be combined with it.

    Raises:
        ValueError: with both options.
    """
    if options.random_streams not in ("torch", "layout"):
        raise ValueError(f"`random_streams={options.random_streams!r}` must be 'torch' or 'layout'.")
    if options.random_streams == "layout":
        check_options_with(_GIVEN, options, _WITH_LAYOUT, "random_streams='torch'")


def check_draws_run(random_streams: str, module: pl.LightningModule, layout: Layout) -> None:
    """Refuse modules whose draws cannot be seen (compiled code), or whose steps are not tried (manual optimization).

    Raises:
        MisconfigurationException: with what to change.
    """
    if random_streams == "torch":
        return
    if is_given_compiled(module):
        refuse_with(_GIVEN, "`torch.compile`: what compiled code draws cannot be seen")
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        refuse_with(_GIVEN, "`torch.jit`: what scripted code draws cannot be seen")
    if not module.automatic_optimization and layout.pipeline * layout.data > 1:
        refuse_with(_GIVEN, "`automatic_optimization=False` on several stages or replicas, where no step is tried")


_WITH_ACTIVATIONS = {"compile_layers": False, "layout": None}
"""Options that cannot be combined with activations in host memory, and the only values that do."""
_WITH_TOKENS = {"sequence_parallel": False, "random_streams": "torch"}
"""Likewise where layers run again on some of their tokens."""
_WITH_PIECES = {
    "compile_layers": False,
    "weight_sharding": False,
    "sequence_parallel": False,
    "expert_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
}
"""Likewise where modules in them run in pieces."""
_ONE_BACKWARD = ("1f1b", "gpipe", "interleaved")
"""Schedules whose backward is one piece."""


def check_activations(options: Any) -> None:
    """Refuse invalid values of ``activation_offload`` and ``mlp_chunks``, and options that do not go with them.

    Raises:
        ValueError: with both options.
    """
    check_chunks(options.mlp_chunks)
    if options.mlp_chunks is not None:
        given = f"mlp_chunks={options.mlp_chunks!r}"
        check_options_with(given, options, _WITH_PIECES, "mlp_chunks=None")
        if options.pipeline_schedule not in _ONE_BACKWARD:
            raise ValueError(
                f"`{given}` computes a module again in one backward, which `pipeline_schedule="
                f"{options.pipeline_schedule!r}` may split; use '1f1b', 'gpipe' or 'interleaved'."
            )
    request = host_request(options.activation_offload)
    if request is None:
        return
    given, recompute = f"activation_offload={options.activation_offload!r}", options.activation_recompute
    check_options_with(given, options, _WITH_ACTIVATIONS, "activation_offload=None")
    if recompute is not None and options.sizes["context"] > 1:
        raise ValueError(
            f"`{given}` cannot be combined with `activation_recompute={recompute!r}` over context ranks; use "
            "`context_parallel_size=1`, `activation_recompute=None`, or `activation_offload=None`."
        )
    if request.splits:
        check_options_with(given, options, _WITH_TOKENS, "activation_offload='all'")
        if recompute is not None:
            raise ValueError(
                f"`{given}` decides by itself which tokens of a layer are computed again, and cannot be combined with "
                f"`activation_recompute={recompute!r}`; use `activation_offload='all'`, which keeps what is left of "
                "the activations in host memory, or `activation_recompute=None`."
            )


def check_activations_run(value: Any, precision: str, module: pl.LightningModule) -> None:
    """Refuse modules and a precision with which activations are not known to be a layer's own.

    Raises:
        MisconfigurationException: with what to change.
    """
    if value is None:
        return
    given = f"activation_offload={value!r}"
    if splits_itself(module):
        refuse_with(given, "a module whose own `configure_model` has split it; leave that to the strategy")
    if is_given_compiled(module):
        refuse_with(given, "`torch.compile`: compiled code decides by itself what it keeps for the backward")
    if precision == "fp8-mixed":
        refuse_with(given, "`precision='fp8-mixed'`, with which it has not been tried")
